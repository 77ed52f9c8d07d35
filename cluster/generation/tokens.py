"""Tokenize and Detokenize, as `/tokenize` and `/detokenize` are."""

from cluster.detokenize import detokenize
from cluster.generation.prompt import PromptReader
from cluster.text_generator import TextGenerator
from tandem.v1 import generation_pb2


class TokenService:
    """What a text is to the model, and back."""

    def __init__(self, text: TextGenerator, prompts: PromptReader) -> None:
        self._text = text
        self._prompts = prompts

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """
        Raises:
            GenerationError: it is nothing that the model could take as a prompt.
        """
        prompt = self._prompts.read(request)
        assert isinstance(prompt.text, str), "there are no token ids in a request to tokenize"
        token_ids = await self._text.planner.tokenize(
            prompt.text, add_special_tokens=prompt.add_special_tokens, param=prompt.name
        )
        return generation_pb2.TokenizeResponse(
            tokens=token_ids,
            count=len(token_ids),
            max_model_len=self._text.model.max_model_len,
            token_strs=self._text.tokenizer.raw_tokens(token_ids) if request.return_token_strs else (),
        )

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """
        Raises:
            GenerationError: the model has no such token, or no context for so many.
        """
        self._prompts.check_model(request)
        text = await detokenize(self._text, request.tokens)
        return generation_pb2.DetokenizeResponse(text=text)
