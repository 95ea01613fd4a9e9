//! Help of `towline audit`.

pub(in crate::cli) const AUDIT: &str = "\
Examples:
  towline audit show --dir /var/lib/towline/audit --since 1h
  towline audit verify --dir /var/lib/towline/audit --agent west/node-7 --trusted ca.crt

An audit log has one entry for each decision about a request for a name (who asked for what, where the bytes go, the rule, the \
time), and one with the bytes at the end. An agent keeps one with [audit] in its settings; the command line keeps one if the \
variable TOWLINE_AUDIT names a folder for it. A request that cannot be recorded is refused.

docs/security.md says what a verified log proves.";

pub(in crate::cli) const SHOW: &str = "\
Examples:
  towline audit show --dir /var/lib/towline/audit --since 1h
  towline audit show --dir /var/lib/towline/audit --denied --name 'run-7/**'

The entries are shown unverified: run `towline audit verify` to verify them.

JSON: a line for each entry: seq time kind, and of a decision: actor action name manifest repository to verdict rule; of an end: \
of bytes requests outcome; hash";

pub(in crate::cli) const EXPORT: &str = "\
Examples:
  towline audit export --dir /var/lib/towline/audit > audit.jsonl
  towline audit export --dir /var/lib/towline/audit --since 1d | jq 'select(.verdict == \"deny\")'

JSON: one object a line, with --json or without";

pub(in crate::cli) const VERIFY: &str = "\
Examples:
  towline audit verify --dir /var/lib/towline/audit --agent west/node-7 --trusted ca.crt
  towline audit verify --dir ~/.local/state/towline/log --agent west/node-7 --user eva
  towline audit verify --dir /var/lib/towline/audit --offline

Each entry has a hash over itself and all before it. The last one is published in the repository, signed with the agent's key: \
by an agent every minute, for a command line's log when a command ends. Any edit, gap, reordering and truncation up to the last \
published head is found, and the first bad entry is named: exit code 4. Whoever may write the log's files could replace all \
entries after that head; with --offline, or if no head is found, all entries. A head that cannot be read, or whose signature is \
invalid, is a fault, too.

Signatures of a revoked certificate are not accepted. If --trusted is a file of certificates, no list of revoked ones is used.

JSON: sound log origin first last published published_at heads local_only: [from to], faults: [segment line entry what]";
