# Shared by the server scripts: sourced, not run. Needs DIR, the server's state folder.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=${TOWLINE_SERVERS:-$root/target/servers}
venv=${TOWLINE_VENV:-$root/.venv}

# Is process $1 one of ours? The marker in its environment tells it from a process that got a dead one's number.
alive() { [ -n "${1:-}" ] && grep -zqxF "TOWLINE_SERVER=$DIR" "/proc/$1/environ" 2>/dev/null; }

# Is daemon $1 running?
up() { [ -f "$DIR/$1.pid" ] && alive "$(cat "$DIR/$1.pid")"; }

# Starts daemon $1: the command that follows, which must stay in the foreground.
spawn() {
  local name=$1; shift
  TOWLINE_SERVER=$DIR setsid nohup "$@" >"$DIR/$name.out" 2>&1 </dev/null &
  echo $! >"$DIR/$name.pid"
}

# Ends daemon $1, by force after ten seconds.
halt() {
  local pid; pid=$(cat "$DIR/$1.pid" 2>/dev/null) || return 0
  if alive "$pid"; then
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 50); do alive "$pid" || break; sleep 0.2; done
    if alive "$pid"; then kill -9 "$pid" 2>/dev/null || true; fi
  fi
  rm -f "$DIR/$1.pid"
}

# Waits up to $1 seconds for the command that follows to succeed.
wait_for() {
  local end=$((SECONDS + $1)); shift
  while [ $SECONDS -lt $end ]; do "$@" >/dev/null 2>&1 && return 0; sleep 0.2; done
  echo "timed out: $*" >&2; return 1
}

# The first port from $1 on that nobody listens on. Kept by the caller: a restart stays at its port.
free_port() {
  local port=$1
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
  echo "$port"
}

# Writes the env file that the tests read, whole or not at all: NAME=VALUE lines on stdin.
publish() { cat >"$1.new"; mv "$1.new" "$1"; }
