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
  local pid=$!
  echo $pid >"$DIR/$name.pid"
  # The marker is seen once the command itself runs.
  while ! alive $pid && kill -0 $pid 2>/dev/null; do sleep 0.02; done
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

# Waits until the command that follows succeeds: up to $2 seconds, and no longer than daemon $1 runs. Does not ask for the marker: a
# process that has just begun, and becomes another program, has no environment for a moment.
wait_for() {
  local daemon=$1 end=$((SECONDS + $2)) pid; shift 2
  pid=$(cat "$DIR/$daemon.pid")
  while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $end ]; do "$@" >/dev/null 2>&1 && return 0; sleep 0.2; done
  if kill -0 "$pid" 2>/dev/null; then echo "timed out: $*" >&2; else echo "$daemon ended: see $DIR/$daemon.out" >&2; fi
  return 1
}

# The first of $1 ports in a row, from $2 on, that nobody listens on. Kept by the caller: a restart stays at its port.
free_ports() {
  local count=$1 port=$2 next
  next=$port
  while [ $((next - port)) -lt "$count" ]; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$next") 2>/dev/null; then port=$((next + 1)); fi
    next=$((next + 1))
  done
  echo "$port"
}

# Writes the env file that the tests read, whole or not at all: NAME=VALUE lines on stdin.
publish() { cat >"$1.new"; mv "$1.new" "$1"; }
