//! The longer texts of the help: what no single flag can say, and an example of each command.

#[cfg(feature = "agent")]
pub(super) mod agents;

/// First text of `towline help`.
pub(super) const ABOUT: &str = "\
Towline saves files and folders in a repository, and brings them back anywhere.

A repository lives in a folder or in an S3 bucket. Whoever may write there may save, at the same time as others, with no \
server in between. What a repository holds already is neither stored nor sent again, and every byte that comes back \
has been checked.";

/// Last text of `towline help`.
pub(super) const MANUAL: &str = "\
Getting started:
  towline save ckpt/ run-7/step-1000         save a folder under a name
  towline ls                                 what has been saved
  towline show run-7/step-1000               what one name holds
  towline restore run-7/step-1000 out/       bring it back
  towline watch out/ run-7                   save what a training writes there

  export TOWLINE_REPO=s3://bucket/prefix     from now on, share through a bucket
  towline init                               make a repository there (once)
  towline sync ~/repo s3://bucket/prefix     or copy what is lacking there

Names:
  NAME is segments of letters, digits and . _ + = - separated by /, such as
  run-7/step-1000. Where a PREFIX may be given, run-7 means run-7 itself and
  everything below run-7/.

Sizes and times:
  512M, 1.5G, 1GiB, or a number of bytes; K M G T P E are powers of 1024.
  90s, 1h 30m, 7d, or a number of seconds. So everywhere: settings and the API too.

Runs:
  Names RUN/step-N are the steps of the run RUN. Where a NAME is read, RUN@latest,
  RUN@upto=N, RUN@min=METRIC or RUN@max=METRIC may stand for the step they choose.

Which repository:
  1. --repo URL: a path, file:///path or s3://bucket/prefix
  2. the variable TOWLINE_REPO
  3. `repository` in towline.toml: in the working folder or above it, else in
     ~/.config/towline
  4. else ~/.local/share/towline/repository, made by the first save

~/.config/towline/towline.toml may hold:
  repository = \"s3://bucket/prefix\"
  memory = \"1G\"
  endpoint = \"https://host:port\"
  allow_http = true

One that is found in the working folder or above it may set repository and
endpoint, or raise memory above the default, once `towline config trust PATH`
has recorded what it holds, and allow_http never. In CI use flags, or TOWLINE_REPO, AWS_ENDPOINT_URL and
TOWLINE_ALLOW_HTTP=1. None counts that is a link, that another user than you or
root owns, or that others may write.

S3:
  Credentials come from where AWS tools look: environment, profiles, SSO, web
  identity, instance roles. For other stores set --endpoint or
  AWS_ENDPOINT_URL. `towline doctor` says what it found, and what is wrong.

Interrupted? Run the same command again: what has arrived is used. At Ctrl-C a
save or sync records what it has sent, within seconds, and says how much that
is; a second signal ends it at once.

Exit codes:
  0 done          1 anything else   2 wrong usage         3 not found
  4 damaged       5 conflict        6 store unreachable   7 denied
  130 interrupted (Ctrl-C)          143 terminated (SIGTERM)";

/// Last text of `towline -h`.
pub(super) const SHORT: &str = "`towline help` says more, `towline help COMMAND` shows examples.";

pub(super) const REPO: &str =
    "The repository: a path, file:///PATH or s3://BUCKET/PREFIX [also: TOWLINE_REPO, towline.toml]";

pub(super) const WATCHED_METRIC: &str = "Tell a metric of each step: a number, or what trainer_state.json calls it; may be given \
several times [default: all that was logged at the step]";

pub(super) const ENDPOINT: &str = "The S3 endpoint [also: AWS_ENDPOINT_URL, towline.toml]";

pub(super) const INIT: &str = "\
Examples:
  towline init                              the repository of the settings
  towline init /mnt/towline                 a folder, for you alone
  towline init --shared /mnt/team/towline   a folder that its group may read and write; --shared=all: that all may read
  towline init s3://bucket/models           a bucket, made if you may

A repository in a folder has files of mode 0600 and folders of mode 0700, shared with its group 0660 and 2770, with all 0664 and 2775. Whoever writes later keeps to the mode of the file \"repository\" in it, whatever their umask.";

pub(super) const SAVE: &str = "\
Examples:
  towline save ckpt/ run-7/step-1000
  towline save model.safetensors models/base --label license=apache-2.0
  towline save ckpt/ run-7/step-2000 --metric loss=0.12 --metric acc=0.9 --world-size 8 --framework pytorch
  towline save ckpt/ run-7/step-3000 --explain
  towline save rank-3/ run-7/step-3000 --rank 3 --world-size 8 --attempt 4711.0
  towline save data/ corpus/v2 --base corpus/v1 --exclude '*.tmp' --exclude cache/

A .towlineignore file in a folder, with lines as in .gitignore, leaves out files as --exclude does. Modes, times, \
symbolic links, empty folders, holes and names in any encoding are kept. Not kept: owners and groups, extended attributes, \
ACLs, hard links (each becomes a file of its own; its bytes are stored once), access times; devices, pipes and sockets are left \
out, and named.

What --metric, --world-size and --framework tell is kept with the name, also by cp and sync, where `towline runs`, \
`ls --long` and RUN@min=METRIC find it. A metric is a finite number; at most 64.

With --rank, ranks that share nothing but the repository save one step: each its own files (RUN/step-N from rank-local \
folders; a file that several have must be the same), in any order. Whoever comes last makes the step visible; until then \
there is none, and if that never happens a later collect frees what was uploaded. A rank may run again with the same files. \
Ranks that start again with other content need another --attempt, the same for all: --attempt $SLURM_JOB_ID.$SLURM_RESTART_COUNT, \
say. Attempts and world sizes are never mixed.

A name that exists is replaced, which is said; if somebody else moved it meanwhile, nothing is, and the exit code is 5. With \
--if-absent nothing is ever replaced: if the name exists when the save begins or when it is committed, the exit code is 5. A name \
that looks like a step and is none, such as run-7/step-abc, is warned about: `latest` does not find it.

Of a step of a run, tensors that changed are stored as differences to a key step: the first, then one of every 8 (--key-every), \
and whatever would not get smaller by it. 16-bit tensors that are others of the same save, rounded, take no room. --explain \
tells for each tensor what became of it, and why.

--compression if-faster stores chunks as they are while the repository (a fast disk, a fast link) takes them faster than they \
are compressed: such a save is shorter, and takes more room.

JSON: name manifest logical_bytes new_bytes stored_bytes chunks new_chunks files seconds skipped warnings; replaced: manifest saved \
bytes, where something else had the name; with --explain \
explained: [path tensor bytes here_bytes stored_bytes reasons], with \
--rank rank, ranks, attempt, complete, waits_for and step";

pub(super) const WATCH: &str = "\
Examples:
  towline watch out/ run-7                       beside the training, until SIGTERM or Ctrl-C
  towline watch out/ run-7 --restore-latest      first bring the latest step back, if out/ holds none
  towline watch out/ run-7 --once                save what is finished, then end: for cron
  towline watch out/ run-7 --metric loss=eval_loss --metric lr=3e-5
  towline watch /mnt/nfs/out run-7 --settle 2m   where other machines write

Saved as RUN/step-N, each once, and again when it is written again: the folders checkpoint-N (Hugging Face, accelerate), \
step-N (torchtitan), global_stepN (DeepSpeed), iter_N (Megatron) and such, and the files *.pt *.pth *.bin *.ckpt \
*.safetensors with a number. What has no number (last.ckpt) is passed over, and that is said.

A checkpoint is finished when its framework says so (trainer_state.json, .metadata, a file `latest` beside it) and nothing \
changed for a fifth of --settle; when it was renamed from a temporary name; or when nothing changed for all of --settle. A \
save that fails is tried again. DIR may come and go.

What Hugging Face's Trainer logged at a checkpoint's step (log_history in its trainer_state.json) is told as metrics of the step, \
as TowlineCallback tells it: every finite number but step and epoch. With --metric NAME=KEY, or NAME where both are one, only what is \
named is taken, as it was logged last up to the step, or from the top of the file (best=best_metric). --metric NAME=NUMBER tells \
that number of each step, and what is logged besides.

--restore-latest puts the step back under the name that it had, whole or not at all, before anything is watched; if that \
fails, so does the command.

At SIGTERM and Ctrl-C it saves what is finished, and what will be within --on-term; at SIGTERM it waits one --settle for a \
last checkpoint even if none is being written. Exit code 1 if something could not be saved in time; it is named. A second \
signal ends it at once. It ends with these codes, not with 130 or 143.

JSON: a line for each event: event, and what belongs to it";

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

What DEST holds already is used instead of fetched. If a file in the way differs, nothing is written and the exit code \
is 5, unless --overwrite. Each file appears whole or not at all, and nothing is written outside DEST.

--delete says what it deleted, and how much. It does not empty a folder for a tree without any file, unless --yes says so. --dry-run \
says what would be fetched, replaced and deleted, and ends as the restore would; it writes and makes nothing.

--path names a file or folder of the tree (of SUBPATH, if that is given), or a pattern: * and ? stay within a segment, ** is any number of them, \
[a-z] and {a,b} are as in a shell. Paths are kept: model/a.bin goes to DEST/model/a.bin. One that matches nothing is exit code 3, \
and nothing is written.

With --tensor, only the chunks that hold what is asked for are fetched, and one file is written: tensors.safetensors in \
DEST, or DEST itself if it ends in .safetensors. GLOB is a tensor's name or a pattern (* stands for dots, but not for slashes). PATH, a file or \
folder or a pattern of one, tells apart tensors of one name. BOX is as in numpy: [0:128, :, -2:]. A tensor that ranks saved in \
parts (DCP) is one tensor, whatever the parts. --shard parts rows as torch.chunk and FSDP do: where they do not divide, the \
last parts are shorter, or empty. A file that is there is replaced only with --overwrite.

JSON: name bytes fetched_bytes sources reused_bytes files seconds, replaced_files if there are any, with --delete removed: files bytes \
paths; with --tensor: name file tensors bytes fetched_bytes sources chunks seconds; sources: agent cache site remote repository; with \
--dry-run dry_run";

pub(super) const TENSORS: &str = "\
Examples:
  towline tensors run-7/step-1000
  towline tensors run-7@latest 'model.layers.*' 'optim:*'
  towline tensors run-7@latest --json | jq '[.tensors[].bytes] | add'

PARTS counts the parts that a tensor was saved in (DCP), each by another rank perhaps; FILE is then their folder. `towline \
restore NAME DEST --tensor GLOB` brings tensors back, whole or boxes of them.

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
[step name counts saved bytes files chunks metrics world_size framework]";

pub(super) const EXPIRE: &str = "\
Examples:
  towline expire run-7 --keep-last 3 --keep-every 1000 --dry-run    say what would go
  towline expire run-7 --keep-last 3 --keep-every 1000
  towline expire run-7 --keep-min loss --keep-max acc               the best, and the latest

A step stays if any rule keeps it; the latest always does, and the others go, all in one commit. If a step was saved again \
or removed meanwhile, nothing is removed and the exit code is 5. Steps saved meanwhile stay. A metric that no step has is \
exit code 3.

Only names go. The bytes that nothing else needs go with the next `towline collect`.

JSON: dry_run run kept: [step name bytes reasons] removed: [step name bytes], with --dry-run freed_bytes";

pub(super) const SHOW: &str = "\
Examples:
  towline show run-7@latest                           summed up
  towline show run-7/step-1000 --files                its files and folders
  towline show run-7/step-1000 --tensors              its tensors, and how each is stored
  towline show run-7/step-1000:model.safetensors      one file, with its tensors
  towline show run-7/step-1000:tokenizer              one folder
  towline show run-7/step-1000 --json | jq '.entries[].tensors[].name'

STORED counts the chunks of the tree; what these are differences to is told besides (bases), and read with them. The JSON always \
has all files and tensors.

JSON: name path (if one was given) manifest saved bytes stored_bytes base_bytes behind files chunks metrics world_size framework labels entries";

pub(super) const DIFF: &str = "\
Examples:
  towline diff run-7/step-1000 run-7/step-2000

One line a path: + added, - removed, ~ contents changed, . only mode or time changed. NEW counts the bytes of chunks \
that only B has: what a restore of B lacks where A is.

JSON: a b changes: [path change bytes_before bytes_after new_bytes]";

pub(super) const CAT: &str = "\
Examples:
  towline cat run-7/step-1000:config.json
  towline cat run-7/step-1000:model.safetensors --range 0-7    the first eight
  towline cat run-7/step-1000:train.log --range -1000          the last thousand
  towline cat corpus/v2:part-3.jsonl --range 5000000- | head   from there on

Only the chunks that hold the range are fetched. The bytes themselves go to standard output, with --json too.";

pub(super) const RM: &str = "\
Examples:
  towline rm run-7/step-1000
  towline rm run-7/step-1000 run-7/step-2000 scratch
  towline rm --recursive run-7       run-7 itself, if it is a name, and every name below run-7/
  towline rm run-7/step-1000 --dry-run       and how much that would free

All go in one commit, or none if one of them is not there (exit code 3). Only names go. The bytes that nothing else needs go with the next `towline collect`.

JSON: removed: [name]; with --dry-run dry_run names: [name bytes] freed_bytes (null if a damaged map keeps it from being told)";

pub(super) const CP: &str = "\
Examples:
  towline cp run-7/step-9000 models/best
  towline cp run-7@min=loss models/best
  towline cp --stand-alone run-7@min=loss customers/a

Nothing is copied but the name: both then share every byte. A name that exists is replaced, which is said; with --if-absent it is \
not, and the exit code is 5.

A step is stored as differences to chunks of other steps. Whoever may read it may read those chunks, too. With --stand-alone they are \
stored again without them: the copy takes more room and needs no other name.

JSON: name from, and replaced: manifest saved bytes, where something else had the name";

pub(super) const SYNC: &str = "\
Examples:
  towline sync /mnt/repo s3://bucket/prefix                    every name
  towline sync s3://bucket/prefix /mnt/repo run-7 models/best  these, or below
  towline sync /mnt/repo s3://bucket/prefix run-7@latest       one step, chosen in the source
  towline sync /mnt/repo /mnt/new --init --dry-run             what would move to a repository that --init makes

Only what the destination lacks is moved. --endpoint and --allow-http hold for both sides; --memory is shared.

JSON: names moved_bytes skipped_bytes chunks new_chunks seconds, with --dry-run dry_run planned: [name bytes moved_bytes replaces]";

pub(super) const VERIFY: &str = "\
Examples:
  towline verify                     is everything there that should be?
  towline verify --data              read and check every byte
  towline verify run-7/step-1000 --data
  towline verify --data --repair     then save again to heal

An entry of the log that cannot be read stops every command. --repair sets it aside, keeps what the other entries say, and tells what is lost and which names are kept. Run it while nothing is being saved.

The exit code is 4 if anything is damaged; the JSON is printed all the same.

JSON: packs chunks bytes damaged: [what error names tensors] repaired seconds, and name if one was given";

pub(super) const COLLECT: &str = "\
Examples:
  towline collect --dry-run          what would be done
  towline collect                    list what nothing needs, delete what was listed a day ago
  towline collect --grace 0          both at once

Safe at any time, next to savers, readers and other collectors. What a save or sync has sent so far is kept while its session is \
open, whatever --grace says; that is told with its bytes. A session ends when its command does. That of a command that was killed \
ends once nothing was written in it for a day, by the store's clock, and a collect comes by; until then the same save uses what it holds.

JSON: condemned_packs purged_packs deleted_objects repacked_packs merged_segments fenced_sessions freed_bytes live_bytes \
waiting_objects waiting_bytes held_packs held_bytes held: [session name packs bytes ends] steps seconds";

pub(super) const DOCTOR: &str = "\
Examples:
  towline doctor                     the repository that would be used
  towline doctor s3://bucket/prefix

Tries what the store really does (several writers at once, too), how fast it is, which credentials were used and where \
they came from, which rules of the bucket would hurt, and the limits of this machine. Each trouble comes with what helps. \
The exit code is 1 if something is bad.

JSON: checks: [what outcome detail help]";

pub(super) const CONFIG: &str = "\
Examples:
  towline config trust .                     towline.toml in this folder, as it is now
  towline config trust project/towline.toml
  towline config untrust project

A towline.toml that came with a folder could send what you save, and requests that your credentials sign, anywhere. So it may \
set `repository` and `endpoint`, or raise `memory` above the default, only as you have seen them: when it changes, it must be trusted again. What is trusted is recorded \
below ~/.config/towline/trusted.

JSON: path, with trust also digest and sets: {repository endpoint memory}";

pub(super) const COMPLETIONS: &str = "\
Examples:
  towline completions bash > ~/.local/share/bash-completion/completions/towline
  towline completions zsh > ~/.zfunc/_towline
  towline completions fish > ~/.config/fish/completions/towline.fish";
