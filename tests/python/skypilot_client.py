"""Applies an admin policy with SkyPilot's own client. In an environment of its own (setup.sh): it wants other versions of
packages than the other frameworks.

Each line of standard input is `{"url": ..., "config": a task}`; each line of standard output what became of it.
"""

from __future__ import annotations

import json
import sys

import sky
from sky import admin_policy
from sky.server.requests.request_names import AdminPolicyRequestName
from sky.utils import config_utils

KEPT = {"kept": {"as": "it is"}}


def applied(url: str, config: dict) -> dict:
    task = sky.Task.from_yaml_config(config)
    name = next(iter(AdminPolicyRequestName))
    request = admin_policy.UserRequest(task, config_utils.Config(KEPT), name, None, True)
    try:
        answer = admin_policy.RestfulAdminPolicy(url).apply(request)
    except sky.exceptions.UserRequestRejectedByPolicy as error:
        return {"rejected": str(error)}
    assert dict(answer.skypilot_config) == KEPT
    resources = answer.task.resources
    listed = list(resources) if isinstance(resources, list) else sorted(resources, key=str)
    places = [{"infra": one.infra.to_str(), "accelerators": one.accelerators} for one in listed]
    return {"before": task.to_yaml_config(), "after": answer.task.to_yaml_config(), "places": places}


for line in sys.stdin:
    print(json.dumps(applied(**json.loads(line))), flush=True)
