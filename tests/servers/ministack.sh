#!/bin/bash
# MiniStack's S3 on loopback, with signatures enforced for a user of its own. Packages: setup.sh.
#   ministack.sh start | stop | status
# start is idempotent; it writes target/servers/ministack.env. Objects do not outlive the server.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
DIR=$state/ministack ENV=$state/ministack.env

start() {
  if [ -f "$ENV" ] && up ministack; then cat "$ENV"; return; fi
  stop; rm -rf "$DIR"; mkdir -p "$DIR"
  local port endpoint; port=$(free_ports 1 $((9100 + RANDOM % 900))); endpoint=http://127.0.0.1:$port
  export AUTH=true BIND_HOST=127.0.0.1 MINISTACK_HOST=127.0.0.1 GATEWAY_PORT=$port PERSIST_STATE=0
  export S3_PERSIST=1 S3_DATA_DIR=$DIR/s3 STATE_DIR=$DIR/state
  spawn ministack "$venv/bin/ministack"
  wait_for ministack 120 curl -sf -o /dev/null "$endpoint/_ministack/health"
  user "$endpoint" | publish "$ENV"
  cat "$ENV"
}

# The built-in root key "test" is accepted with any secret; the signatures of a user made here are checked.
user() {
  "$venv/bin/python" - "$1" <<'PY'
import json, sys
import botocore.session

iam = botocore.session.get_session().create_client(
    "iam", endpoint_url=sys.argv[1], region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
)
iam.create_user(UserName="towline")
everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
iam.put_user_policy(UserName="towline", PolicyName="all", PolicyDocument=json.dumps(everything))
key = iam.create_access_key(UserName="towline")["AccessKey"]
print(f"S3_ENDPOINT={sys.argv[1]}")
print(f"AWS_ACCESS_KEY_ID={key['AccessKeyId']}")
print(f"AWS_SECRET_ACCESS_KEY={key['SecretAccessKey']}")
print("AWS_REGION=us-east-1")
PY
}

stop() { rm -f "$ENV"; halt ministack; }

case ${1:-} in
  start) start ;;
  stop) stop ;;
  status) if up ministack; then echo "ministack: up"; else echo "ministack: down"; fi ;;
  *) sed -n '2,4p' "$0"; exit 2 ;;
esac
