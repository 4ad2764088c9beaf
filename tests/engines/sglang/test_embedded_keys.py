"""Which keys a route takes, whichever are set: the embedded engine's server decides as SGLang does."""

import itertools
import json
import subprocess

import httpx
import pytest
from starlette.responses import Response

from radix_rl.server.auth import BearerAuth

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

KEY, ADMIN_KEY = "plain-key", "admin-key"
AUTHORIZATIONS = [
    None,
    f"Bearer {KEY}",
    f"Bearer {ADMIN_KEY}",
    f"bearer {KEY}",
    f"Bearer  {KEY}",
    f"Basic {KEY}",
    KEY,
    "Bearer",
]

DECISIONS = """
import itertools, json, sys
from sglang.srt.utils.auth import AuthLevel, decide_request_auth
keys, admin_keys, paths, values = json.loads(sys.argv[1])
levels = {"/admin": AuthLevel.ADMIN_OPTIONAL}
print(json.dumps([
    decide_request_auth(
        method="POST", path=path, authorization_header=value, api_key=key, admin_api_key=admin_key,
        auth_level=levels.get(path, AuthLevel.NORMAL),
    ).allowed
    for key, admin_key, path, value in itertools.product(keys, admin_keys, paths, values)
]))
"""


async def test_keys_are_taken_as_sglang_takes_them_whichever_are_set(sglang_python: str) -> None:
    choices = [None, KEY], [None, ADMIN_KEY], ["/admin", "/plain", "/health", "/metrics"], AUTHORIZATIONS
    told = subprocess.run(
        [sglang_python, "-c", DECISIONS, json.dumps(choices)], check=True, capture_output=True, text=True
    )
    theirs = json.loads(told.stdout)

    ours = []
    for key, admin_key, path, value in itertools.product(*choices):
        guarded = BearerAuth(
            Response("open"), api_key=key, admin_api_key=admin_key, admin_paths=frozenset({"/admin"})
        )
        headers = {} if value is None else {"Authorization": value}
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            ours.append((await client.post(path, headers=headers)).status_code == 200)

    assert ours == theirs
