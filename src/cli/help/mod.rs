//! Long help texts: explanations and examples of each command.

#[cfg(feature = "agent")]
pub(super) mod agents;
#[cfg(feature = "agent")]
pub(super) mod audit;

/// First text of `towline help`.
pub(super) const ABOUT: &str = "\
Towline saves files and folders in a repository, and restores them anywhere.

A repository is in a folder or in an S3 bucket. Everybody who may write there can save, also at the same time, without a server. \
Content that the repository has is neither stored nor sent again, and every restored byte has been checked.";

/// Last text of `towline help`.
pub(super) const MANUAL: &str = "\
Getting started:
  towline save ckpt/ run-7/step-1000         save a folder under a name
  towline ls                                 what has been saved
  towline show run-7/step-1000               the contents of one name
  towline restore run-7/step-1000 out/       restore it
  towline watch out/ run-7                   save the checkpoints that a training writes

  export TOWLINE_REPO=s3://bucket/prefix     from now on use a bucket
  towline init                               make a repository there (once)
  towline sync ~/repo s3://bucket/prefix     or copy what is missing there

Names:
  NAME is segments of letters, digits and . _ + = - separated by /, such as
  run-7/step-1000. Where a PREFIX may be given, run-7 means run-7 itself and
  everything below run-7/.

Sizes and times:
  512M, 1.5G, 1GiB, or a number of bytes; K M G T P E are powers of 1024.
  90s, 1h 30m, 7d, or a number of seconds. Settings and the API use the same units.

Runs:
  Names RUN/step-N are the steps of the run RUN. Where a NAME is read, RUN@latest,
  RUN@upto=N, RUN@min=METRIC or RUN@max=METRIC selects a step.

Which repository:
  1. --repo URL: a path, file:///path or s3://bucket/prefix
  2. the variable TOWLINE_REPO
  3. `repository` in towline.toml: in the working folder or above it, else in
     ~/.config/towline
  4. else ~/.local/share/towline/repository, created by the first save

~/.config/towline/towline.toml may hold:
  repository = \"s3://bucket/prefix\"
  memory = \"1G\"
  endpoint = \"https://host:port\"
  allow_http = true

A towline.toml in the working folder or above it may set repository and
endpoint, or raise memory above the default, once `towline config trust PATH`
has recorded what it holds, and allow_http never. In CI use flags, or
TOWLINE_REPO, AWS_ENDPOINT_URL and TOWLINE_ALLOW_HTTP=1. None counts that is a
link, that another user than you or root owns, or that others may write.

S3:
  Credentials come from the same places as for AWS tools: environment,
  profiles, SSO, web identity, instance roles. For other stores set --endpoint
  or AWS_ENDPOINT_URL. `towline doctor` reports what it found, and problems.

Interrupted? Run the same command again: what has arrived is used, after a kill
what was indexed. At Ctrl-C a save or sync records what it has sent, within
seconds, and says how much that is; a second signal ends it at once.

Exit codes:
  0 done          1 other error     2 wrong usage         3 not found
  4 damaged       5 conflict        6 store unreachable   7 denied
  130 interrupted (Ctrl-C)          143 terminated (SIGTERM)";

/// Last text of `towline -h`.
pub(super) const SHORT: &str = "`towline help` says more, `towline help COMMAND` shows examples.";

pub(super) const REPO: &str =
    "The repository: a path, file:///PATH or s3://BUCKET/PREFIX [also: TOWLINE_REPO, towline.toml]";

pub(super) const WATCHED_METRIC: &str = "Set a metric of each step: a number, or its key in trainer_state.json; may be given \
several times [default: all metrics that were logged at the step]";

pub(super) const ENDPOINT: &str = "The S3 endpoint [also: AWS_ENDPOINT_URL, towline.toml]";

pub(super) const INIT: &str = "\
Examples:
  towline init                              the repository that the settings name
  towline init /mnt/towline                 a folder, for you alone
  towline init --shared /mnt/team/towline   a folder that its group may read and write; --shared=all: all may read
  towline init s3://bucket/models           a bucket, created if you may

A repository in a folder has files of mode 0600 and folders of mode 0700; shared with its group 0660 and 2770, with all 0664 and \
2775. Later writers use the mode of the file \"repository\" in it, whatever their umask.

JSON: repository (its location) id (what a policy calls `repository`) created bucket_created";

pub(super) const SAVE: &str = "\
Examples:
  towline save ckpt/ run-7/step-1000
  towline save model.safetensors models/base --label license=apache-2.0
  towline save ckpt/ run-7/step-2000 --metric loss=0.12 --metric acc=0.9 --world-size 8 --framework pytorch
  towline save ckpt/ run-7/step-3000 --explain
  towline save rank-3/ run-7/step-3000 --rank 3 --world-size 8 --attempt 4711.0
  towline save data/ corpus/v2 --base corpus/v1 --exclude '*.tmp' --exclude cache/

A .towlineignore file in a folder, with lines as in .gitignore, leaves out files as --exclude does, if it is of the \
same owner as the folder, of you or of root. Modes, times, symbolic links, empty folders, holes and names in any \
encoding are kept. Not kept: owners and groups, extended attributes, ACLs, access times, hard links (each becomes a \
separate file; its bytes are stored once). Devices, pipes and sockets are left out and reported.

--metric, --world-size and --framework are kept with the name, also by cp and sync, for `towline runs`, `ls --long` and \
RUN@min=METRIC. A metric is a finite number; at most 64.

With --rank, ranks that share only the repository save one step together: each saves its own files (RUN/step-N from rank-local \
folders; a file in several must be the same), in any order. The last rank makes the step visible; until then there is none, and \
if that never happens a later collect frees what was uploaded. A rank may retry with the same files. Ranks that restart with \
other content need another --attempt, the same for all: for example --attempt $SLURM_JOB_ID.$SLURM_RESTART_COUNT. Attempts and \
world sizes are never mixed.

An existing name is replaced, which is reported; if somebody else moved it meanwhile, it is not, and the exit code is 5. With \
--if-absent nothing is ever replaced: if the name exists when the save begins or when it is committed, the exit code is 5. A \
name that looks like a step but is not, such as run-7/step-abc, causes a warning: `latest` does not find it.

In a run, changed tensors are stored as differences to a key step: the first, then one of every 8 (--key-every), if that makes \
them smaller. 16-bit tensors that are rounded from others of the same save take no space. --explain reports for each tensor how \
it is stored, and why.

--compression if-faster stores chunks raw while the repository (a fast disk, a fast link) accepts bytes faster than they can be \
compressed: the save is shorter, and takes more space.

--compression predict is for runs that save each step: 32-bit weights and second moments are predicted from the step before, as \
the optimizer (Adam, AdamW, SGD with momentum, Lion) computes them. A predicted step of Adam takes less than half of what it takes whole. \
Reading it reads the steps back to the key step, at most seven, and reading weights reads their moments. It needs weights and \
optimizer state in one save, and --memory of at least 96M; else the save warns.

JSON: name manifest logical_bytes new_bytes stored_bytes chunks new_chunks files seconds skipped warnings; replaced: manifest saved \
bytes lost_metrics, if the name existed; with --explain, if files were read, \
explained: [path tensor bytes here_bytes stored_bytes reasons], with \
--rank rank, ranks, attempt, complete, waits_for and step";

pub(super) const WATCH: &str = "\
Examples:
  towline watch out/ run-7                       beside the training, until SIGTERM or Ctrl-C
  towline watch out/ run-7 --restore-latest      first restore the latest step, if out/ has none
  towline watch out/ run-7 --once                save finished checkpoints, then end: for cron
  towline watch out/ run-7 --compression predict  a training that saves each step: see `towline help save`
  towline watch out/ run-7 --metric loss=eval_loss --metric lr=3e-5
  towline watch /mnt/nfs/out run-7 --settle 2m   where other machines write

Each checkpoint is saved as RUN/step-N, once, and again if it is written again: the folders checkpoint-N (Hugging Face, \
accelerate), step-N (torchtitan), global_stepN (DeepSpeed), iter_N (Megatron) and such, N alone (Orbax) unless entries beside it \
have other names of checkpoints, and the files *.pt *.pth *.bin *.ckpt *.safetensors with a number. \
Files without a number (last.ckpt) are skipped and reported.

A checkpoint is finished when its framework marked it finished (trainer_state.json, .metadata, a file `latest` beside it) and \
nothing changed for a fifth of --settle; when it was renamed from a temporary name; or when nothing changed for all of --settle. \
A save that fails is retried. DIR may disappear and come back.

Metrics that Hugging Face's Trainer logged at a checkpoint's step (log_history in its trainer_state.json) become metrics of the \
step, as with TowlineCallback: every finite number except step and epoch. With --metric NAME=KEY, or NAME if both are the same, \
only the named ones are used: the last value logged up to the step, or that at the top of the file (best=best_metric). --metric \
NAME=NUMBER sets that number for each step, in addition to what is logged.

--restore-latest restores the latest step under its original name, whole or not at all, before it watches; if that fails, the \
command ends. A run without steps is no failure.

A step that the repository has with other content is replaced, which is reported.

At SIGTERM and Ctrl-C it saves finished checkpoints, as far as --on-term allows; at SIGTERM it waits one --settle for a last \
checkpoint even if none is being written. Checkpoints that could not be saved in time are named, and the exit code is 1. A \
second signal ends it at once. It ends with these codes, not with 130 or 143.

JSON: a line for each event: event, and its fields";

pub(super) const RESTORE: &str = "\
Examples:
  towline restore run-7/step-1000 out/                       into out/
  towline restore run-7/step-1000:model.safetensors /tmp/    one file
  towline restore run-7/step-1000 out/ --overwrite --delete  exactly that
  towline restore run-7/step-1000 out/ --overwrite --delete --dry-run
  towline restore run-7@latest out/                          the last step
  towline restore run-7@min=loss:model.safetensors /tmp/     one file of the best
  towline restore run-7@latest out/ --path config.json --path 'model-*.safetensors'
  towline restore run-7@latest out/ --tensor 'model.embed.weight[0:1000]' --tensor '*norm*'
  towline restore run-7@latest rank-3/ --tensor '*' --shard 3/8

Content that DEST has is reused instead of fetched. If an existing file differs, nothing is written and the exit code is 5, \
unless --overwrite. Each file appears whole or not at all, and nothing is written outside DEST.

--delete reports what it deleted, and how much. What the .towlineignore files in DEST leave out of a save stays, and is \
counted; they count as they are before the restore, and only if the tree has them, too. \
--delete does not empty a folder for a tree without any file, unless --yes is given. \
--dry-run reports what would be fetched, replaced and deleted, and ends with the same exit code as the restore; it writes \
nothing.

--path names a file or folder of the tree (of SUBPATH, if that is given), or a pattern: * and ? stay within a segment, ** is any number of them, \
[a-z] and {a,b} are as in a shell. Paths are kept: model/a.bin goes to DEST/model/a.bin. A --path that matches nothing is exit code 3, \
and nothing is written.

With --tensor, only the chunks of the selected tensors are fetched, and one file is written: tensors.safetensors in DEST, or \
DEST itself if it ends in .safetensors. GLOB is a tensor's name or a pattern (* matches dots and slashes, too). PATH, a file or \
folder or a pattern, selects among tensors of one name. BOX is as in numpy: [0:128, :, -2:]. A tensor that ranks saved in parts \
(DCP) is one tensor. --shard splits rows as torch.chunk and FSDP do: if they do not divide, the last parts are shorter, or \
empty. An existing file is replaced only with --overwrite.

JSON: name bytes fetched_bytes sources reused_bytes files seconds, replaced_files if there are any, with --delete removed: files bytes \
paths, ignored if any stay; with --tensor: name file tensors bytes fetched_bytes sources chunks seconds, replaced if a file was; sources: agent cache site remote repository; with \
--dry-run dry_run";

pub(super) const TENSORS: &str = "\
Examples:
  towline tensors run-7/step-1000
  towline tensors run-7@latest 'model.layers.*' 'optim:*'
  towline tensors run-7@latest --json | jq '[.tensors[].bytes] | add'

PARTS is the number of parts of a tensor (DCP), perhaps one for each rank; FILE is then their folder. `towline restore NAME DEST \
--tensor GLOB` restores tensors, whole or boxes of them.

JSON: name tensors: [name dtype shape bytes parts path]";

pub(super) const LS: &str = "\
Examples:
  towline ls
  towline ls run-7 --long
  towline ls --json | jq -r '.refs[].name'

JSON: refs: [name manifest bytes files chunks saved metrics world_size framework]";

pub(super) const RUNS: &str = "\
Examples:
  towline runs                       every run
  towline runs project               the runs below project/
  towline runs run-7                 one run, and below it its steps
  towline runs run-7 --json | jq '.runs[0].steps[] | [.step, .metrics.loss]'

A run is the names RUN/step-N, in the order of N. SIZE sums the files of all steps; SAVED and FACTS are those of the latest. \
Of two names with one number (step-7, step-07) the one saved later counts; the other is listed in brackets.

JSON: runs: [run count first last latest saved bytes metrics world_size framework steps]; steps, of the run that was named: \
[step name counts saved bytes files chunks behind metrics world_size framework]";

pub(super) const EXPIRE: &str = "\
Examples:
  towline expire run-7 --keep-last 3 --keep-every 1000 --dry-run    show what would be removed
  towline expire run-7 --keep-last 3 --keep-every 1000
  towline expire run-7 --keep-min loss --keep-max acc               the best, and the latest

A step stays if any rule keeps it; the latest always does. All others are removed in one commit. If a step was saved again or \
removed meanwhile, nothing is removed and the exit code is 5. Steps saved meanwhile stay. A metric that no step has is exit code \
3.

A rule for a metric does not keep steps without it, and the plan reports them.

Only names are removed; unlike with `towline rm`, undelete needs --keep-removed. `towline collect` lists what no other name \
needs, and deletes it once its grace (24h) is over.

JSON: dry_run run kept: [step name bytes reasons lacks] removed: [step name bytes lacks], with --dry-run freed_bytes";

pub(super) const SHOW: &str = "\
Examples:
  towline show run-7@latest                           a summary
  towline show run-7/step-1000 --files                its files and folders
  towline show run-7/step-1000 --tensors              its tensors, and how each is stored
  towline show run-7/step-1000:model.safetensors      one file, with its tensors
  towline show run-7/step-1000:tokenizer              one folder
  towline show run-7/step-1000 --json | jq '.entries[].tensors[].name'

STORED is the size of the tree's chunks; the bases that are read with them are reported separately. The JSON always has all \
files and tensors.

JSON: name path (if one was given) manifest saved bytes stored_bytes base_bytes behind files chunks metrics world_size framework labels entries";

pub(super) const DIFF: &str = "\
Examples:
  towline diff run-7/step-1000 run-7/step-2000

One line a path: + added, - removed, ~ contents changed, . only mode or time changed. NEW is the size of chunks that only B has: \
a restore of B where A is fetches them.

JSON: a b changes: [path change bytes_before bytes_after new_bytes]";

pub(super) const CAT: &str = "\
Examples:
  towline cat run-7/step-1000:config.json
  towline cat run-7/step-1000:model.safetensors --range 0-7    the first eight
  towline cat run-7/step-1000:train.log --range -1000          the last thousand
  towline cat corpus/v2:part-3.jsonl --range 5000000- | head   from there on

Only the chunks of the range are fetched. The bytes go to standard output, with --json too.";

pub(super) const RM: &str = "\
Examples:
  towline rm run-7/step-1000
  towline rm run-7/step-1000 run-7/step-2000 scratch
  towline rm --recursive run-7       run-7 itself, if it is a name, and every name below it
  towline rm run-7/step-1000 --dry-run       and how many bytes that would free
  towline rm --now customers/a               erase: no undelete

All are removed in one commit, or none if one of them does not exist (exit code 3). Their values are kept for 7 days, unless \
`towline collect --keep-removed` says otherwise: `towline undelete NAME` restores them. At most 1,024 values of 64 TiB in all \
are kept; beyond that the oldest go sooner, which is reported. After that `towline collect` lists what no name needs, and \
deletes it once its grace (24h) is over.

With --now nothing is kept, and earlier kept values of these names are forgotten, even if the names no longer exist. `towline \
collect --grace 0` then deletes their content at once.

JSON: removed: [name] kept forgotten; with --dry-run dry_run names: [name bytes] freed_bytes (null if a map is \
damaged) forgotten";

pub(super) const UNDELETE: &str = "\
Examples:
  towline undelete run-7/step-1000                      its last value
  towline undelete run-7 --recursive                    the steps of a run that were removed last, by one command
  towline undelete models/best --as models/before       the replaced value, under another name
  towline undelete models/best --replace                swap it with the current value, which is kept in turn
  towline undelete models/best --version 812 --as models/early    an earlier value; `towline history` lists them

This is one commit, and moves no content. An existing name is left alone (exit code 5) without --replace. The undelete is \
refused if a chunk is gone (exit code 3) or known to be damaged (exit code 4), saying since when.

JSON: name from version manifest bytes files saved metrics world_size framework was, and replaced: manifest saved bytes kept, if \
the name existed; with --recursive: names: [the same] earlier: [name] if some were removed before, and stay so";

pub(super) const HISTORY: &str = "\
Examples:
  towline history models/best
  towline history models/best --json | jq '.kept[] | [.version, .saved, .until]'

Lists earlier values of the name that can be undeleted, the latest first: of removed names, and of names that save, cp and sync \
replaced by another tree. Values before an `expire` or an amend are not kept. UNTIL is when a collect forgets the value at the \
earliest, if it keeps values for 7 days.

JSON: name present: version manifest bytes files saved metrics world_size framework (null if the name does not exist) kept: [version \
manifest bytes files saved metrics world_size framework taken: entry at by (removed or replaced, null if not known) until]";

pub(super) const CP: &str = "\
Examples:
  towline cp run-7/step-9000 models/best
  towline cp run-7@min=loss models/best
  towline cp --stand-alone run-7@min=loss customers/a

Only the name is copied: both names then share every byte. An existing name is replaced, which is reported; with --if-absent it \
is not, and the exit code is 5.

A step is stored as differences to chunks of other steps, and whoever may read it may read those chunks, too. With --stand-alone \
the copy is stored without differences to other names: it takes more space and needs no other name.

JSON: name from, and replaced: manifest saved bytes, if the new name existed";

pub(super) const SETTLE: &str = "\
Examples:
  towline settle run-7@latest                  once the training has ended, or before it moves
  towline settle run-7/step-9000
  towline settle --paused 1h                   of all runs without a new step for an hour; from cron, near the bucket

A step is stored as differences to an earlier one, so a restore reads both: about half more than the step takes for itself (and of a predicted step, up to seven earlier ones). An agent of \
another site can send it without; a bucket cannot. This stores those chunks again, in byte planes without a base; what they took \
before is freed by `towline collect` after its grace, once most of their pack is unused. The name, its content and its place in the run stay what they are, and the next \
step is stored as differences to this one; in a run that is saved with --compression predict, those up to the next key step are. Of several steps, those that cannot be settled are reported, and the exit code is that of \
the first.

JSON: settled: name chunks stored_bytes read_bytes: [before, now]; failed: name error";

pub(super) const SYNC: &str = "\
Examples:
  towline sync /mnt/repo s3://bucket/prefix                    every name
  towline sync s3://bucket/prefix /mnt/repo run-7 models/best  these, or below
  towline sync /mnt/repo s3://bucket/prefix run-7@latest       one step, chosen in the source
  towline sync /mnt/repo /mnt/new --init --dry-run             what would be copied to a repository that --init creates
  towline sync /mnt/repo s3://bucket/prefix --if-absent        only names that the bucket lacks

Only what the destination lacks is copied. From a directory, a step that is stored as differences is copied without the steps \
that they are to, unless these are there, or are copied too: each of its chunks is stored again for itself where that is less. Of a run of \
which every further step will be copied, --as-stored copies fewer bytes in the long run. --endpoint and --allow-http apply to both sides, which share --memory.

A name that the destination has with another value is replaced, which is reported, unless that value is newer: then it is kept, all other \
names are copied, and the exit code is 5. It is newer if it was saved later, or replaced the source's value there; not, if the source \
had it and replaced it. With --force such names are replaced, too; with --if-absent no existing name is, and the exit code is 0. \
A name is not replaced if TO would forget an old value for it, of any name, that `undelete` can restore (1,024 are kept): \
`towline history` tells what was replaced, and a collect of TO forgets values after 7 days; with --forget it is replaced. \
A name that cannot be copied, as it is damaged or refused, does not stop the others; the exit code is that of its error.

Removals are not carried: a name that was removed in FROM stays in TO, also a step that a training gave up when it went back, which may be the latest there; and a name that was removed in TO comes back. Both are reported while the removed values are kept.

JSON: names moved_bytes skipped_bytes chunks new_chunks seconds, replaced: [name] if names were, forgotten if values were, kept: [name reason saved saved_there] \
if names were (reason: newer, exists), failed: [name kind error] if some of several names could not be copied, left_behind: [name] if some were removed in FROM, returned: [name] if some had been removed in TO, with --dry-run dry_run, and planned: [name bytes moved_bytes replaces] if something would move";

pub(super) const LABEL: &str = "\
Examples:
  towline label run-7                          show its labels
  towline label run-7 residency=DE,FR          restrict every step of the run to DE and FR
  towline label data/raw sensitivity=restricted tenant=clinic

Labels apply to a name and every name below it. They only get stricter: a residency becomes the intersection of both lists, a \
sensitivity the higher of public, internal, restricted and secret. Copies, later steps, and names made from it (derived-from) \
have them, too. They need a policy in force, which says where content with labels may go. `towline save --label residency=DE` \
sets a label with a save.

JSON: name labels own declassified";

pub(super) const VERIFY: &str = "\
Examples:
  towline verify                     check that all objects are there
  towline verify --data              read and check every byte
  towline verify run-7/step-1000 --data
  towline verify --data --repair     then save the same content again, and repair again, to heal

A log entry that cannot be read stops every command. --repair sets it aside, keeps what the other entries say, and reports what \
is lost and which names are kept. Run it while nobody saves. After repairs everything is verified a second time.

Names are read from the newest snapshot of the log. If an entry before it is unreadable, nothing can confirm the snapshot: where \
only trusted programs may write to the repository, --accept-snapshot trusts the one that the error names, and nothing is lost.

The exit code is 4 if anything is damaged; with --repair, if anything still is or changes of the log were lost. The JSON is \
printed in any case.

JSON: packs chunks bytes damaged: [what error names more_names tensors] repaired left: [as damaged] lost seconds, and name if \
one was given";

pub(super) const COLLECT: &str = "\
Examples:
  towline collect --dry-run          what would be done
  towline collect                    list unneeded objects, delete those listed a day ago
  towline collect --grace 0          both at once
  towline collect --keep-removed 0   first forget all removed and replaced values

The old values of removed or replaced names are kept for --keep-removed, by default 7 days, by the store's clock; the grace \
begins after that.

The bytes of packs are those in the store. Which chunks of them are used, and live_bytes, unused_bytes and kept_bytes, are as \
the maps of the names tell. A pack is rewritten only if its own list of chunks says that it is mostly unused, too: --dry-run does \
not read these lists.

Safe at any time, beside savers, readers and other collectors. Uploads of a save or sync are kept while its session is open, \
whatever --grace says; the report has their bytes. A session ends when its command does. That of a killed command ends at a \
collect, once nothing was written in it for a day by the store's clock; until then the same save can use its uploads.

JSON: condemned_packs purged_packs deleted_objects repacked_packs merged_segments fenced_sessions freed_bytes forgotten_values \
kept_values kept_bytes live_bytes unused_bytes \
waiting_objects waiting_bytes held_packs held_bytes held: [session name packs bytes ends] unfinished_objects \
unfinished_bytes steps seconds";

pub(super) const DOCTOR: &str = "\
Examples:
  towline doctor                     the repository that would be used
  towline doctor s3://bucket/prefix

Tests the store (several writers at once, too) and its speed, the credentials and their source, harmful rules of the bucket, and \
the limits of this machine. Each problem comes with advice. The exit code is 1 if something is bad.

JSON: checks: [what outcome detail help]";

pub(super) const CONFIG: &str = "\
Examples:
  towline config trust .                     towline.toml in this folder, with its current contents
  towline config trust project/towline.toml
  towline config untrust project

A towline.toml that came with a folder could send your saves, and requests signed with your credentials, anywhere. So it may set \
`repository` and `endpoint`, or raise `memory` above the default, only as you have seen it: when it changes, it must be trusted \
again. The record is below ~/.config/towline/trusted.

JSON: path, with trust also digest and sets: {repository endpoint memory}";

pub(super) const COMPLETIONS: &str = "\
Examples:
  towline completions bash > ~/.local/share/bash-completion/completions/towline
  towline completions zsh > ~/.zfunc/_towline
  towline completions fish > ~/.config/fish/completions/towline.fish";
