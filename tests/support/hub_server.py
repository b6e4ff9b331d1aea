"""The endpoints of the Hugging Face hub that `create_repo` and `upload_folder` of its client call."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TOKEN = "a-token-of-the-tests"
LARGE = ".safetensors"
"""Files with this ending are uploaded as large ones, of which the commit has the hash alone."""


class HubServer:
    """`repos` has the options of each repository that was created; `files` the bytes of each commit's files by path."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}
        routes = (
            ("/api/repos/create", self.create, "POST"),
            ("/api/validate-yaml", self.validate, "POST"),
            ("/api/models/{owner}/{name}/preupload/main", self.preupload, "POST"),
            ("/{owner}/{name}.git/info/lfs/objects/batch", self.batch, "POST"),
            ("/large/{oid}", self.put, "PUT"),
            ("/api/models/{owner}/{name}/commit/main", self.commit, "POST"),
        )
        self.app = Starlette(routes=[Route(path, call, methods=[method]) for path, call, method in routes])

    async def create(self, request: Request) -> Response:
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid username or password."}, 401)
        repo = f"{body['organization']}/{body['name']}"
        url = str(request.base_url) + repo
        if repo in self.repos:
            return JSONResponse({"error": "You already created this model repo", "url": url}, 409)
        self.repos[repo] = body
        return JSONResponse({"url": url})

    async def validate(self, request: Request) -> Response:
        """The metadata of the model card must be between two lines `---`."""
        content = (await request.json())["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no metadata"}]
        return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)

    async def preupload(self, request: Request) -> Response:
        paths = [file["path"] for file in (await request.json())["files"]]
        return JSONResponse(
            {
                "files": [
                    {"path": p, "uploadMode": "lfs" if p.endswith(LARGE) else "regular", "shouldIgnore": False}
                    for p in paths
                ]
            }
        )

    async def batch(self, request: Request) -> Response:
        objects = [
            item | {"actions": {"upload": {"href": f"{request.base_url}large/{item['oid']}"}}}
            for item in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def put(self, request: Request) -> Response:
        body = await request.body()
        right = hashlib.sha256(body).hexdigest() == request.path_params["oid"]
        if right:
            self.large[request.path_params["oid"]] = body
        return Response(status_code=200 if right else 400)

    async def commit(self, request: Request) -> Response:
        repo = "{owner}/{name}".format(**request.path_params)
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                self.messages.append(value["summary"])
            elif item["key"] == "file":
                self.files.setdefault(repo, {})[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                self.files.setdefault(repo, {})[value["path"]] = self.large[value["oid"]]
        url = f"{request.base_url}{repo}/commit/{'0' * 40}"
        return JSONResponse({"success": True, "commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""})
