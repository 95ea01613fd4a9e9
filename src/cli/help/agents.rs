//! Help of the commands for agents and certificates.

pub(in crate::cli) const IDENTITY: &str = "\
Examples:
  towline identity init                                  once, on a safe machine
  towline identity issue west/node-7 --to node-7/        then copy node-7/ to that node
  towline identity rotate node-7/                        before it expires; a running agent sees it
  towline identity show node-7/
  towline identity issue-policy --to policy/             the key that signs policies

An agent connects only to agents whose certificates an authority in its ca.crt has signed, both ways. The certificate names the \
agent: towline://SITE/AGENT, a URI among the subject's alternative names. Certificates of other tools work as well: for \
cert-manager, set `uris` in the Certificate, with the usages `server auth` and `client auth`. ca.crt may hold several \
authorities, for example while one replaces another. A file `revoked` beside it lists revoked certificates: a serial number or \
fingerprint a line. Agents read changed files again, and close links to revoked peers.

Whoever has ca.key can issue agents: keep it away from the nodes. No command overwrites it.

The certificate of a policy key only signs policies: agents refuse connections with it, and an agent's key signs no policy.

JSON: certificates: [identity authority policy subject issuer serial fingerprint not_before not_after], and folder where files were \
written";

pub(in crate::cli) const AGENT: &str = "\
Examples:
  towline agent --config /etc/towline/agent.toml

FILE needs at least:
  repository = \"s3://bucket/prefix\"

and may also have:
  socket = \"/run/towline/agent.sock\"   # default: towline/agent.sock in XDG_RUNTIME_DIR
  http = \"127.0.0.1:7070\"              # the API on loopback, too, with the token beside the socket
  memory = \"1G\"                        # for buffers; --memory overrides it
  grace = \"25s\"                        # for running tasks at SIGTERM
  identity = \"/etc/towline/tls\"         # for other agents: from `towline identity issue`
  listen = \"0.0.0.0:7071\"              # address for them, QUIC and TCP
  callers = [\"home/*\"]                # those that may make this one warm and pin
  [[allow]]                            # with `listen`: who may read which names from it
  agents = \"home/*\"
  names = \"run-7/**\"
  [cache]
  dir = \"/var/lib/towline/cache\"
  capacity = \"200G\"
  [peers]
  addresses = [\"node-2:7071\"]

The other commands find it at the well-known socket, or where the variable TOWLINE_AGENT says (a path, or `none`). It runs until \
SIGTERM or Ctrl-C: then it accepts no new work and gives running tasks the grace; a second signal ends it at once. \
docs/operations.md says how to run it with systemd or beside a pod's containers, and describes the API.

JSON: a line once it listens: event socket http listen";

pub(in crate::cli) const STAGE: &str = "\
Examples:
  towline stage run-7@latest                     before the processes of a training start
  towline stage models/base --tensor 'layers.*'  only these tensors
  towline stage run-7/step-40:model.safetensors  only this file
  towline stage --list                           what is in memory, and how many processes use it
  towline stage --clear                          free what no process uses
  towline stage models/base --bench              how long each stage takes on this machine
  towline stage models/base --bench --device cuda:0     and to the memory of a GPU
  towline stage models/base --bench --device cuda:0 --decode-on gpu

The agent reads and verifies the tensors once. Processes of this node map them without a copy: towline.load(), and the restores of \
the Python package. The memory is sealed: nobody can change it. The limit is [staging] memory in the agent's settings; if it is \
reached, the tensors that were used longest ago make room. Tensors that no process uses are freed after [staging] keep \
(docs/staging.md).

With --bench this command loads the tensors itself, and frees them. What a GPU got is read back and compared. With --decode-on gpu, \
a GPU decodes and verifies most chunks by itself.

JSON: name tensors bytes reused fetched_bytes sources seconds times: {total first_tensor read decode wait copy}, in seconds; with \
--list: memory, trees: [name below selectors manifest tensors bytes users last_used]; with --clear: freed_bytes; with --bench: name \
device tensors bytes fetched_bytes sources times overlap decoded_on_device compared";

pub(in crate::cli) const WARM: &str = "\
Examples:
  towline warm run-7@latest --wait               before a restore on this node
  towline warm models/base data/v2 --pin 24h     and keep both for a day
  towline warm run-7/step-1000 --from home/node-3 --wait
  towline warm run-7@latest --dry-run            what is missing, and how many bytes
  towline warm run-7@latest --at cloud --pin 24h --wait     on an agent of the site cloud, before jobs start there
  towline warm models/base --at cloud/node-1 --from home    on that agent, from its peers of the site home

With --at the local agent asks the other one, which must list it in its `callers`. If --at is a site, the name decides which of \
its agents, always the same. The pin is then owned by SITE/AGENT/OWNER, with the site and name of the local agent.

Chunks in the cache are not fetched again: run it as often as you like, also after an interruption. Without --wait it prints the \
started tasks, and `towline top` shows their progress. With --wait the exit code is 6 if some chunks could not be fetched, and 1 \
if the cache has no space; interrupting the wait does not stop the agent.

--from fetches from that place alone: what it lacks stays missing, unless --or-repository is given. An unknown site or agent is \
an error that lists the known ones (exit code 3). The report says how many bytes came from each source.

JSON: tasks: [id kind name repository state started seconds progress report], with --at also at and caller; a report is: name manifest chunks bytes \
hits hit_bytes fetched fetched_bytes missing missing_bytes lacking lacking_bytes alone full shortfall_bytes sources pin seconds. hits + fetched + missing are \
chunks, in bytes too; lacking is fetched + missing; alone of them come without the bases that they are stored with, and estimated is \
true if the bytes of these are an estimate";

pub(in crate::cli) const PIN: &str = "\
Examples:
  towline pin models/base                        until it is unpinned
  towline pin run-7@latest --for 24h --reason 'the burst of Friday'
  towline pin run-7@latest --for 24h --at cloud  on the agent of that site that `towline warm` uses

Pinned chunks are never evicted, and space is reserved for those that are not cached yet. A pin survives restarts. A pin that \
does not fit is refused with the number of missing bytes. If the name moves, the pin keeps the old value.

With --at the other agent limits the pins of each asking agent to 7 days, also without --for, and a quarter of its cache, unless \
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
  towline pins --at cloud/node-1     those that the local agent made there

JSON: pins: [id owner reason created expires chunks]";

pub(in crate::cli) const CACHE: &str = "\
Examples:
  towline cache stat
  towline cache stat --at cloud/node-1
  towline cache check                drop damaged chunks, to be fetched again; exit code 4 if there were any
  towline cache evict 10G

JSON: stat: dir chunks bytes slab_bytes capacity pinned_bytes promised_bytes pins journal_bytes hits misses inserts refusals \
evictions damaged; check: chunks bytes damaged: [chunk slab offset]; evict: freed_bytes";

pub(in crate::cli) const TOKEN: &str = "\
Examples:
  towline token new --scope 'read=run-7/**' --scope warm --expires 30d --name dashboard
  towline token new --scope 'save=run-7/*' --scope folder=/ckpt/run-7 --tenant team-a > token
  towline token list
  towline token revoke 01KB2M0Q7X8V5C1N3T9Z4R6S2W

A token gives a process on this node some of the rights, at the agent's address on loopback: Authorization: Bearer TOKEN. The \
agent needs `http` and `tokens`, a file, in its settings. Whoever can open the socket has all rights and needs no token.

  read=PATTERN   read files, list names, choose among steps, of matching names; * is one segment, ** any number
  warm           fetch names that it may read into the cache
  pins           pin these, and see and end its own pins
  save=PATTERN   save or replace matching names, from files at or below folder=DIR
  metrics        read metrics, and statistics of the cache and of peers
  admin          everything, including tokens

A name that a token may not read looks absent to it. It sees and ends only its own tasks. Restores need admin: they write on the \
node. The agent keeps a hash of each token, not the token.

JSON: new: id name tenant scopes created expires used secret; list: tokens: [id name tenant scopes created expires used]; revoke: \
revoked: [id]";

pub(in crate::cli) const HANDOFF: &str = "\
Examples:
  towline handoff list
  towline handoff list --at cloud/node-1      what this agent handed off to that one
  towline handoff retry 01KB2M0Q7X8V5C1N3T9Z4R6S2W
  towline handoff drop 01KB2M0Q7X8V5C1N3T9Z4R6S2W

An agent with [handoff] in its settings accepts checkpoints from other agents that may be stopped before they have saved them, \
and saves them. One that cannot be saved is set aside: it stays on the disk, counts against its sender's quota, and is not \
retried. The list gives the error and the advice: fix the cause, then `retry`; or `drop`.

JSON: list: handoffs: [id from since name repository labels bytes], of what was set aside also aside: since tries kind error help; \
retry: retried: [as handoffs]; drop: dropped: [id]";

pub(in crate::cli) const TOP: &str = "\
Examples:
  towline top                        until Ctrl-C
  towline top --once
  towline top --ready && echo yes
  towline top --at cloud/node-1      what the local agent has asked of that one
  towline top --json | jq '.tasks[] | select(.state == \"running\")'

JSON: health tasks cache pins peers hints sites";

pub(in crate::cli) const PAGE: &str = "\
Examples:
  towline page                       prints an address to open, until Ctrl-C
  towline page --port 7170
  ssh -t -L 7170:127.0.0.1:7170 node towline page --port 7170     the page of an agent on another machine

The page shows what `towline top` shows, and runs, hints, usage and the audit log. It only reads. The address has a token that is \
valid as long as the command runs. Calls go to the agent's socket; an agent with `http` in its settings serves the page there too, \
and asks for its own token or one of `towline token new`.

JSON: event url";

pub(in crate::cli) const POLICY: &str = "\
Examples:
  towline policy check policy.toml
  towline policy test cases.toml
  towline policy sign policy.toml --key policy-key/
  towline policy set policy.toml
  towline policy show
  towline policy explain run-7/step-1000 --to cloud
  towline policy explain run-7/step-1000 --to cloud --agent cloud/node-1 --caller token:ci

A policy describes the sites and has rules for what content may go to them. It is a TOML file, signed by a key for that alone \
(`towline identity issue-policy`); each policy has a higher version than the one before. Every agent and command with a \
certificate enforces it. Without one, content with labels does not move.

JSON: show, check, sign, set: version repository sites rules, of show also text; explain: name to labels verdict basis: by, of a \
rule also line why; test: passed failed cases: [line name to expected verdict basis passed], rules that decide none of them as \
untested: [line why]";

pub(in crate::cli) const SITES: &str = "\
Examples:
  towline sites
  towline sites /etc/towline/sites.toml --check
  towline sites --schema > sites.schema.json

The sites file says what its owner believes of each site: provider, region, agents, repositories, cache, GPUs and their price. \
Jurisdiction and tenancy are those of the signed policy; a file that states others is refused.

JSON: prices policy sites: site provider region jurisdiction tenancy in_policy agents repositories cache gpus: model count \
micro_usd_hour";

pub(in crate::cli) const LINKS: &str = "\
Examples:
  towline links
  towline links sites.toml --prices prices.toml
  towline links --measured

A link leads from one site to another: its path, believed rate and delay, and what a byte costs, by the volume of a month or flat. \
List prices of AWS, Google Cloud, Azure and R2 come with the program; --prices replaces some of them.

--measured shows what agents of the sites have measured, whatever the file believes: the rate that hints use, the 90th percentile of \
a time over its median, and how the last 64 transfers compare to what a hint would have said.

JSON: prices policy links: from to path rate delay_seconds private meter price: unit tiers: up_to micro_usd; micro_usd_month of a \
flat line; with --measured: generated_at links: from to rate spread samples overhead_s outcomes median_error p90_coverage";

pub(in crate::cli) const HINT: &str = "\
Examples:
  towline hint run-7@latest
  towline hint run-7@latest datasets/web --at home --at burst --gpus 64 --objective cost --explain
  towline hint run-7@latest --runtime 4h --returns home:140G:30m --json
  towline hint run-7@latest --commit --lease 2h --wait           hold and fetch it at the best allowed site

For each site: the bytes of the names that its caches hold, by what its agents have published, and those that would move, with the \
bases that they need; the time until they are there; dollars for egress, requests, checkpoints that return and GPUs that wait; and \
whether the signed policy lets them go there. Without --commit nothing is moved. docs/placement.md says how each number is computed.

--commit prints what it holds; with --json, also under commitment: site hint_id inputs bytes missing_bytes ready pin expires task \
seconds fetched_bytes moved_bytes. --await waits until all of it is there, and --end releases it.

JSON: apiVersion hint_id generated_at valid_until epoch complete inputs atRisk notes elsewhere candidates: site rank score verdict deny bytes \
eta_s usd_micro capacity sources inventory_age_s reasons";

pub(in crate::cli) const USAGE: &str = "\
Examples:
  towline usage
  towline usage --by run --month 2026-11
  towline usage --by tenant --sites sites.toml --format csv > november.csv

Bytes that agents exchanged with each other and with the repository's store, as they report it themselves in the repository, every \
ten minutes and as they end; commands and libraries without an agent are not in it. A name of `-` is what belongs to no tree: \
protocol, log, index, maps. Dollars need a sites file with prices; what a meter's volume costs is divided by bytes.

JSON: month by prices notes; rows and total: name from to bytes requests gpu_seconds usd_micro";

pub(in crate::cli) const DECLASSIFY: &str = "\
Examples:
  towline save anonymised/ patients/anonymous
  towline declassify patients/anonymous --sensitivity internal --residency any --reason 'names removed' --key policy-key/

It holds for this very tree only: a tree saved under the name later has the old labels again. A name is refused while another \
one holds the same tree, and if it needs other names' chunks (`towline cp --stand-alone` makes a copy that needs none).

JSON: name labels own declassified";
