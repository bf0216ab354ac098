"""What ``huggingface_hub`` does to push files to a hub: checks of the token, making a repository, the upload of files in LFS
to the hub's storage, and the commit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field

Answer = tuple[int, bytes]


@dataclass(frozen=True)
class Fault:
    path: str
    """Expression that a request's path contains."""
    status: int = 500
    says: str = ""
    """Message of the hub."""
    after: int | None = None
    """Bytes of the request after which the connection is closed, instead of an answer."""


@dataclass(frozen=True)
class Commit:
    repository: str
    message: str
    changed: frozenset[str]
    deleted: frozenset[str]


@dataclass
class Uploads:
    """What was pushed to a hub, and what it refuses."""

    private: dict[str, bool] = field(default_factory=dict)
    """Repositories that were made."""
    commits: list[Commit] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Contents of files in LFS by hash."""
    faults: list[Fault] = field(default_factory=list)
    url: str = ""
    """Address of the hub."""
    storage_url: str = ""
    stalls: bool = False
    """Whether no request is answered."""
    read_only: bool = False
    """Whether the token may not write."""

    def fault(self, path: str) -> Fault | None:
        return next((fault for fault in self.faults if re.search(fault.path, path)), None)

    def get(self, path: str, token: str | None) -> Answer | None:
        """Answer a check of the token."""
        if fault := self.fault(path):
            return fault.status, b""
        if path == "/api/whoami-v2":
            return 200, json.dumps({"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}}).encode()
        if re.fullmatch("/api/models/[^/]+/[^/]+/auth-check/write", path):
            return (403, b"{}") if self.read_only else (200, b"{}")
        return None

    def post(self, path: str, body: bytes, repositories: dict[str, dict[str, bytes]]) -> Answer:
        if path == "/api/repos/create":
            return self._create(json.loads(body), repositories)
        if path == "/api/validate-yaml":
            return 200, b'{"errors": [], "warnings": []}'
        if found := re.fullmatch("/api/models/([^/]+/[^/]+)/preupload/main", path):
            present = repositories[found[1]]
            return 200, json.dumps({"files": [_mode(file, present) for file in json.loads(body)["files"]]}).encode()
        if re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body))
        if found := re.fullmatch("/api/models/([^/]+/[^/]+)/commit/main", path):
            return self._commit(found[1], [json.loads(line) for line in body.splitlines()], repositories)
        return 404, b""

    def _create(self, request: dict[str, str], repositories: dict[str, dict[str, bytes]]) -> Answer:
        name = f"{request['organization']}/{request['name']}"
        if name in repositories:
            return 409, json.dumps({"url": f"{self.url}/{name}"}).encode()
        if self.read_only:
            return 403, b"{}"
        repositories[name] = {}
        self.private[name] = request.get("visibility") == "private" or bool(request.get("private"))
        return 200, json.dumps({"url": f"{self.url}/{name}"}).encode()

    def _batch(self, request: dict[str, list[dict[str, str]]]) -> Answer:
        answers = []
        for one in request["objects"]:
            upload = {"upload": {"href": f"{self.storage_url}/upload/{one['oid']}"}}
            answers.append(one | ({} if one["oid"] in self.objects else {"actions": upload}))
        return 200, json.dumps({"transfer": "basic", "objects": answers}).encode()

    def _commit(
        self, name: str, lines: list[dict[str, dict[str, str]]], repositories: dict[str, dict[str, bytes]]
    ) -> Answer:
        files, deleted, message = {}, set(), ""
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = data = self.objects[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"] and len(data) == value["size"]
            else:
                assert kind == "deletedFile", kind
                deleted.add(value["path"])
        repositories[name] = {path: data for path, data in repositories[name].items() if path not in deleted} | files
        self.commits.append(Commit(name, message, frozenset(files), frozenset(deleted)))
        oid = hashlib.sha1(str(len(self.commits)).encode()).hexdigest()
        return 200, json.dumps({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid}).encode()


def _mode(file: dict[str, str], present: dict[str, bytes]) -> dict[str, object]:
    path = file["path"]
    lfs = path.endswith((".safetensors", ".model", ".bin"))
    data = present.get(path)
    oid = None
    if data is not None:
        oid = hashlib.sha256(data).hexdigest() if lfs else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
