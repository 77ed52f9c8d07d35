"""Certificates for tests, made on the spot: authorities, and what they sign."""

import ipaddress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates, and keeps everything in files of one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())

    @cached_property
    def certificate(self) -> x509.Certificate:
        subject = _name(self._name)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = _builder(subject, subject, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    @cached_property
    def file(self) -> str:
        return self._write(f"{self._name}.pem", self.certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, *names: str, days: int = 1, password: bytes | None = None) -> tuple[str, str]:
        """Files of a certificate for these names (or IPs), and of its key.

        Args:
            days: how long it is valid; below 0: it was until then.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = [x509.IPAddress(ipaddress.ip_address(n)) if n[0].isdigit() else x509.DNSName(n) for n in names]
        builder = _builder(_name(names[0]), self.certificate.subject, key.public_key(), days)
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pem, stem = serialization.Encoding.PEM, f"{self._name}-{names[0]}{days}{'-locked' if password else ''}"
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
        return self._write(f"{stem}.crt", signed.public_bytes(pem)), self._write(f"{stem}.key", private)

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / name
        path.write_bytes(content)
        return str(path)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
    )
