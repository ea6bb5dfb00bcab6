"""Object lock: an object in S3 that cannot be deleted or replaced before a date, not even by the account's owner.

obstore cannot send S3's headers for it, so botocore does. Both read the same credentials and the same endpoint. GCS and
Azure have such locks under other APIs, which are not used here: set a retention policy on the bucket there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from perdure.errors import ExtraMissing, UsageError
from perdure.storage.objects import redacted_url

_S3 = ("s3", "s3a")


class ObjectLock:
    """Locks objects below a URL until a time. Raise UsageError at once if the bucket cannot do that."""

    def __init__(self, url: str, until: datetime) -> None:
        parts = urlsplit(url)
        self._shown, self._bucket, self._prefix = redacted_url(url), parts.netloc, parts.path.strip("/")
        if parts.scheme not in _S3:
            raise UsageError(
                f"{self._shown!r} cannot be locked from here, only objects of s3:// can: set a retention policy on the "
                "bucket (GCS) or an immutability policy on the container (Azure)"
            )
        self.until = until.astimezone(UTC).replace(microsecond=0)  # S3 keeps whole seconds
        if self.until <= datetime.now(UTC):
            raise UsageError(f"an object is locked until a time to come, not until {until.isoformat()}")
        self._client = _client()
        self._call("get_object_lock_configuration")

    def retain(self, name: str) -> None:
        """Lock the newest version of an object in compliance mode, and check that S3 says so."""
        key = f"{self._prefix}/{name}".lstrip("/")
        self._call("put_object_retention", Key=key, Retention={"Mode": "COMPLIANCE", "RetainUntilDate": self.until})
        until = self._call("head_object", Key=key).get("ObjectLockRetainUntilDate")
        if until is None or until < self.until:
            raise UsageError(f"{self._shown}/{name} is written, and not locked until {self.until.isoformat()}")

    def _call(self, method: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, method)(Bucket=self._bucket, **arguments)
        except (BotoCoreError, ClientError) as error:
            said = getattr(error, "response", {}).get("Error", {}).get("Code") or type(error).__name__
            raise UsageError(
                f"objects of bucket {self._bucket!r} cannot be locked ({said}): create a bucket with Object Lock "
                "enabled, and allow s3:PutObjectRetention and s3:GetBucketObjectLockConfiguration"
            ) from None


def _client() -> Any:
    try:
        from botocore.session import get_session
    except ImportError as error:
        raise ExtraMissing("an object lock", "object-lock") from error
    return get_session().create_client("s3")
