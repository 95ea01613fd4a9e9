//! Help of the commands for agents and certificates.

pub(in crate::cli) const IDENTITY: &str = "\
Examples:
  towline identity init                                  once, where it is safe
  towline identity issue west/node-7 --to node-7/        then copy node-7/ to that node
  towline identity rotate node-7/                        before it expires; a running agent sees it
  towline identity show node-7/

An agent talks only to agents whose certificates were signed by an authority in its ca.crt, both ways, and is known by what \
its certificate says: towline://SITE/AGENT, a URI among the subject's alternative names. Files of others work as well: for \
cert-manager, set `uris` in the Certificate, with the usages `server auth` and `client auth`. ca.crt may hold several \
authorities, as while one takes the place of another. A file `revoked` beside it lists certificates that are trusted no \
more: a serial number or fingerprint a line. Agents read changed files again, and end links to whom they trust no more.

Whoever has ca.key can make agents: keep it away from the nodes. Nothing overwrites it.

JSON: certificates: [identity authority subject issuer serial fingerprint not_before not_after], and folder where files were \
written";

pub(in crate::cli) const AGENT: &str = "\
Examples:
  towline agent --config /etc/towline/agent.toml

The least that FILE must say:
  repository = \"s3://bucket/prefix\"

and what more it may:
  socket = \"/run/towline/agent.sock\"   # default: towline/agent.sock in XDG_RUNTIME_DIR
  http = \"127.0.0.1:7070\"              # the API on loopback besides, with the token beside the socket
  memory = \"1G\"                        # for buffers; --memory goes before it
  grace = \"25s\"                        # at SIGTERM, for what runs
  identity = \"/etc/towline/tls\"         # for other agents: from `towline identity issue`
  listen = \"0.0.0.0:7071\"              # where they reach it, over QUIC and TCP
  callers = [\"home/*\"]                # which of them may have this one warm and pin
  [cache]
  dir = \"/var/lib/towline/cache\"
  capacity = \"200G\"
  [peers]
  addresses = [\"node-2:7071\"]

The other commands find it at the well-known socket, or where the variable TOWLINE_AGENT says (a path, or `none`). It runs \
until SIGTERM or Ctrl-C: then it takes nothing new, and what runs has the grace; a second signal takes that away. \
docs/operations.md says how to run it with systemd or beside a pod's containers, and what the API can do.

JSON: a line once it listens: event socket http listen";

pub(in crate::cli) const WARM: &str = "\
Examples:
  towline warm run-7@latest --wait               before a restore on this node
  towline warm models/base data/v2 --pin 24h     and keep both for a day
  towline warm run-7/step-1000 --from home/node-3 --wait
  towline warm run-7@latest --dry-run            what is lacking, and how much
  towline warm run-7@latest --at cloud --pin 24h --wait     on an agent of the site cloud, before the burst lands there
  towline warm models/base --at cloud/node-1 --from home    on this one; `home` is a site as that agent sees it

With --at the agent here asks the other one, which must list it in its `callers`. Of a site's agents the name decides which one, so \
asking again asks the same. The pin is then owned by SITE/AGENT/OWNER, with the site and name of the agent here.

What is in the cache already is not brought again: run it as often as you like, also after an interruption. Without --wait it says \
what has begun, and `towline top` shows how far it is. With --wait the exit code is 6 if some chunks could not be had, and 1 if the cache has no room; interrupting \
the wait does not stop the agent.

--from fetches from that place alone: what it lacks stays missing, unless --or-repository lets the repository give it. A site or agent \
that is not known is an error that lists the known ones (exit code 3). The answer says how many bytes came from where.

JSON: tasks: [id kind name repository state started seconds progress report], with --at also at and caller; a report is: name manifest chunks bytes \
hits hit_bytes fetched fetched_bytes missing missing_bytes lacking lacking_bytes full room_lacking sources pin seconds. hits + fetched + missing are \
chunks, in bytes too; lacking is fetched + missing";

pub(in crate::cli) const PIN: &str = "\
Examples:
  towline pin models/base                        until it is unpinned
  towline pin run-7@latest --for 24h --reason 'the burst of Friday'
  towline pin run-7@latest --for 24h --at cloud  on the agent of that site that `towline warm` chooses

What is pinned is never evicted once it is in the cache, and has room kept for it before. It survives restarts. A pin that \
does not fit is refused with the bytes that are lacking. The name may move on: the pin keeps what it stood for.

With --at the other agent limits the pins of each agent that asks it: 7 days, also without --for, and a quarter of its cache, unless \
[caller_pins] of its settings says otherwise. Its own users are not limited.

JSON: id owner reason created expires chunks, with --at also at";

pub(in crate::cli) const UNPIN: &str = "\
Examples:
  towline unpin 01KB2M0Q7X8V5C1N3T9Z4R6S2W
  towline pins --json | jq -r '.pins[] | select(.owner == \"me\").id' | xargs towline unpin
  towline unpin 01KB2M0Q7X8V5C1N3T9Z4R6S2W --at cloud/node-1

JSON: unpinned: [id]";

pub(in crate::cli) const PINS: &str = "\
Examples:
  towline pins
  towline pins --at cloud/node-1     those that the agent here has asked for there

JSON: pins: [id owner reason created expires chunks]";

pub(in crate::cli) const CACHE: &str = "\
Examples:
  towline cache stat
  towline cache stat --at cloud/node-1
  towline cache check                exit code 4 if anything was damaged; it is dropped, and fetched again when it is needed
  towline cache evict 10G

JSON: stat: dir chunks bytes slab_bytes capacity pinned_bytes promised_bytes pins journal_bytes hits misses inserts refusals \
evictions damaged; check: chunks bytes damaged: [chunk slab offset]; evict: freed_bytes";

pub(in crate::cli) const HANDOFF: &str = "\
Examples:
  towline handoff list
  towline handoff list --at cloud/node-1      what this agent handed off to that one
  towline handoff retry 01KB2M0Q7X8V5C1N3T9Z4R6S2W
  towline handoff drop 01KB2M0Q7X8V5C1N3T9Z4R6S2W

An agent with [handoff] in its settings stores checkpoints of other agents that may not live to save them, and saves them. One that \
cannot be saved is set aside: it stays on the disk, counts against the quota of its sender, and is not tried again. The list \
says why, and what to do: put the cause right, then retry; or drop it.

JSON: list: handoffs: [id from since name repository labels bytes], of what was set aside also aside: since tries kind error help; \
retry: retried: [as handoffs]; drop: dropped: [id]";

pub(in crate::cli) const TOP: &str = "\
Examples:
  towline top                        until Ctrl-C
  towline top --once
  towline top --ready && echo yes
  towline top --at cloud/node-1      what the agent here has asked of that one
  towline top --json | jq '.tasks[] | select(.state == \"running\")'

JSON: health tasks cache pins peers, as they are now";
