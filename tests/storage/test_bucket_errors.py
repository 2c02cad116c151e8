"""What a bucket refuses, told for people, from what obstore was seen to raise."""

from __future__ import annotations

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError

from tidegate.storage.bucket_errors import Teller

TOKEN = "a-session-token/that+is=secret"
START = "Generic S3 error: Error performing PUT https://s3.eu-west-1.amazonaws.com/bucket/a in 12.5ms - "
REFUSED = START + "Server returned non-2xx status code: 403 Forbidden: <?xml version='1.0'?>\n"
SIGNATURE = f"""<Error><Code>SignatureDoesNotMatch</Code><Message>The request signature we calculated does not match the
signature you provided.</Message><AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><CanonicalRequest>PUT
/bucket/a

x-amz-security-token:{TOKEN}
</CanonicalRequest><SignatureProvided>0cc10cac6df92a</SignatureProvided></Error>"""
CUT = """

Debug source:
Generic {{
    store: "S3",
    source: RetryError(RetryErrorImpl {{
        inner: Http(HttpError {{ kind: {kind}, source: reqwest::Error {{ kind: Request }} }})
    }})
}}"""


CREDENTIALS = "; see whether the credentials are right, and still valid"
MAY_NOT = "; these credentials may not do that: let them read, write, delete and list there"
REACHED = " at https://s3.eu-west-1.amazonaws.com; see whether its address is right, and can be reached from here"
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"
UNSENT = START + "HTTP error: error sending request"

TOLD: dict[str, Exception] = {
    "The request signature we calculated does not match the signature you provided (SignatureDoesNotMatch)"
    + CREDENTIALS: PermissionDeniedError(REFUSED + SIGNATURE),
    "Access Denied (AccessDenied)" + MAY_NOT: PermissionDeniedError(REFUSED + DENIED),
    "it answered 403 Forbidden" + MAY_NOT: PermissionDeniedError(REFUSED.split("<", maxsplit=1)[0]),
    "it answered 401 Unauthorized" + CREDENTIALS: UnauthenticatedError(START + "status code: 401 Unauthorized: "),
    "it is in another region; set AWS_REGION to the region that the bucket is in": GenericError(
        START + "Received redirect without LOCATION, this normally indicates an incorrectly configured region"
    ),
    "it did not answer in time" + REACHED: GenericError(UNSENT + CUT.format(kind="Timeout")),
    "the connection was cut" + REACHED: GenericError(UNSENT + CUT.format(kind="Interrupted")),
    "no credentials were found; for S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for Google "
    "GOOGLE_APPLICATION_CREDENTIALS, for Azure AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give this "
    "machine a role": GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 1s - …"),
    "it said … and no more": GenericError(f"it said {TOKEN} and no more\n\nDebug source: x"),
    "got https://account/?sv=…&sig=…&x=1 back": ValueError("got https://account/?sv=2022&sig=abc%2Bdef&x=1 back"),
    "it did not say why": GenericError(""),
}


@pytest.mark.parametrize("said", TOLD)
def test_each_error_is_told_in_one_line_without_secrets(said: str) -> None:
    assert Teller([TOKEN, "x"]).why(TOLD[said]) == said


def test_only_an_object_is_absent() -> None:
    start = "Object at location a not found: Error performing GET https://host/bucket/a in 1ms - "
    absent = [start, f"{start}<Code>NoSuchKey</Code>", f"{start}<Code>BlobNotFound</Code>"]
    failed = [f"{start}<Code>NoSuchBucket</Code>", f"{start}<Code>XAdminUserNotFound</Code>"]
    failed += [f"{start}The specified bucket does not exist."]
    assert all(Teller.is_absent(FileNotFoundError(text)) for text in absent)
    assert not any(Teller.is_absent(FileNotFoundError(text)) for text in failed)
    assert not Teller.is_absent(GenericError("<Code>NoSuchKey</Code>"))
