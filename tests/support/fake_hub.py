"""A server on this machine that speaks the part of the Hugging Face Hub's protocol that an upload needs."""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

TOKEN = "hf_secret_of_the_tests"
USER = "somebody"


class FakeHub:
    """Runs from `with` to its end, in threads of this process.

    Args:
        status: the answer to each request whose path contains `fails_at`: an HTTP status, or "silence".
        fails_at: a part of a path.

    Attributes:
        files: what the last commit holds, by path.
        created: the bodies of the requests for a new repository.
        requests: "METHOD path" of all requests.
    """

    def __init__(self, status: int | str = 200, fails_at: str = "nothing"):
        self.status, self.fails_at = status, fails_at
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.stored: dict[str, bytes] = {}  # large files, by SHA-256
        self.over = threading.Event()

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            fake = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()

    def variables(self) -> dict[str, str]:
        """The environment of a process that uploads here. Without Xet, because the fake does not store that way."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fake = self.fake
        fake.requests.append(f"POST {self.path}")
        if self._fails():
            return
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            fake.created.append(asked)
            self._answer({"url": f"{fake.url}/{asked['organization'] or USER}/{asked['name']}"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", self.path):
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False, "oid": None} for path in paths]
            self._answer({"files": files})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            self._answer(
                {
                    "transfer": "basic",
                    "objects": [
                        one | {"actions": {"upload": {"href": f"{fake.url}/stored/{one['oid']}"}}} for one in objects
                    ],
                }
            )
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/commit/main", self.path):
            self._commit(
                self.path.removeprefix("/api/models").removesuffix("/commit/main"),
                [json.loads(line) for line in body.splitlines()],
            )
        else:
            self._answer({"error": "no such address"}, 404)

    def do_GET(self) -> None:
        self.fake.requests.append(f"GET {self.path}")
        if self._fails():
            return
        if "/xet-write-token/" not in self.path:
            self._answer({"error": "no such address"}, 404)
            return
        expires = int(time.time()) + 3600
        self._answer({"casUrl": f"{self.fake.url}/xet", "exp": expires, "accessToken": "of the storage"})

    def do_PUT(self) -> None:
        length = self.headers["Content-Length"]
        content = self.rfile.read(int(length)) if length else self._chunks()
        self.fake.requests.append(f"PUT {self.path}")
        if self._fails():
            return
        digest = self.path.rpartition("/")[2]
        if hashlib.sha256(content).hexdigest() != digest:
            self._answer({"error": "another SHA-256"}, 400)
        else:
            self.fake.stored[digest] = content
            self._answer({})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.fake.stored[value["oid"]]
        self.fake.files = files
        self._answer({"success": True, "commitUrl": f"{self.fake.url}{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def _fails(self) -> bool:
        """Answers as the fake was told to, if this is such a request."""
        if self.fake.fails_at not in self.path:
            return False
        if self.fake.status == "silence":
            self.fake.over.wait()
        else:
            self._answer({"error": "as the test asked for"}, int(self.fake.status))
        return True

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keeps the output of the tests clean."""
