//! Reports as text for people.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;

use super::output::{Colors, printable, table, write_table};
use crate::ops::{
    Change, Check, CollectReport, Damage, Diagnosis, ExpirePlan, Explained, KeptReason, Listed, Outcome, PartReport,
    PlannedName, PlannedStep, RemovePlan, Replaced, RestoreReport, RestoreTensorsReport, RunListed, SaveReport,
    StepListed, SyncReport, TensorListed, VerifyReport, WatchEvent,
};
use crate::repository::SourceBytes;
use crate::repository::log::StepFacts;
use crate::size::show;
use crate::tree::IGNORE_FILE;

/// Paths that a text lists, at most.
const LISTED: usize = 20;

pub(super) fn save(report: &SaveReport) -> String {
    let mut text = format!(
        "saved {}{}: {} in {}, {}\n  new: {} in {} of {}; {} written\n  manifest: {}\n",
        report.name,
        replaced(report.replaced.as_ref()),
        show(report.logical_bytes),
        counted(report.files, "file"),
        seconds(report.seconds),
        show(report.new_bytes),
        counted(report.new_chunks, "chunk"),
        counted(report.chunks, "chunk"),
        show(report.stored_bytes),
        report.manifest,
    );
    if !report.explained.is_empty() {
        let rows: Vec<_> = report.explained.iter().map(explained).collect();
        text += "\n";
        text += &table(&["FILE", "TENSOR", ">SIZE", ">HERE", ">STORED", ">RATIO", "HOW"], &rows);
    }
    text
}

fn explained(one: &Explained) -> Vec<String> {
    vec![
        printable(&one.path),
        one.tensor.as_deref().map_or_else(|| "-".to_owned(), printable),
        show(one.bytes),
        show(one.here_bytes),
        show(one.stored_bytes),
        ratio(one.bytes - one.here_bytes, one.stored_bytes),
        printable(&one.reasons.join("; ")),
    ]
}

pub(super) fn save_part(report: &PartReport) -> String {
    let stands = match (report.complete, report.waits_for) {
        (true, _) => "complete: the parts of all ranks are there".to_owned(),
        (false, Some(rank)) if report.ranks == 2 => format!("not complete yet: rank {rank} is awaited"),
        (false, Some(rank)) => format!("not complete yet: rank {rank} is awaited, perhaps others"),
        (false, None) => "not complete yet".to_owned(),
    };
    let (rank, ranks, attempt) = (report.rank, report.ranks, &report.attempt);
    let own = save(&report.part);
    let own = if report.complete { own } else { own.replacen("saved ", "saved this rank's part of ", 1) };
    format!("part of rank {rank} of {ranks}, attempt {attempt}: {stands}\n{own}")
}

/// ` (SOURCE: BYTES, ...)`; empty if nothing was fetched.
pub(super) fn by_source(bytes: &SourceBytes) -> String {
    let sources = [
        ("this node's agent", bytes.agent),
        ("cache", bytes.cache),
        ("this site", bytes.site),
        ("other sites", bytes.remote),
        ("repository", bytes.repository),
    ];
    let from = sources.into_iter().filter(|(_, bytes)| *bytes > 0);
    let from: Vec<String> = from.map(|(source, bytes)| format!("{source}: {}", show(bytes))).collect();
    if from.is_empty() { String::new() } else { format!(" ({})", from.join(", ")) }
}

/// ` (replaced 1.0 GiB, saved 2026-01-01T00:00:00Z)`, if a name was replaced.
pub(super) fn replaced(replaced: Option<&Replaced>) -> String {
    let described = |old: &Replaced| {
        let lost = match old.lost_metrics.as_slice() {
            [] => String::new(),
            lost => format!("; its metrics are gone with it: {}", lost.join(", ")),
        };
        format!(" (replaced {}, saved {}{lost})", show(old.bytes), old.saved)
    };
    replaced.map(described).unwrap_or_default()
}

pub(super) fn restore(report: &RestoreReport) -> String {
    let dry = report.dry_run;
    let mut text = format!(
        "{} {}: {} in {}, {}\n  {}: {}{}; found in place: {}\n",
        if dry { "would restore" } else { "restored" },
        report.name,
        show(report.bytes),
        counted(report.files, "file"),
        seconds(report.seconds),
        if dry { "would fetch" } else { "fetched" },
        show(report.fetched_bytes),
        by_source(&report.sources),
        show(report.reused_bytes),
    );
    if report.replaced_files > 0 {
        let what = if dry { "would replace" } else { "replaced" };
        let _ = writeln!(text, "  {what}: {} that differed", counted(report.replaced_files, "file"));
    }
    if let Some(removed) = &report.removed {
        let what = if dry { "would delete" } else { "deleted" };
        let _ = writeln!(text, "  {what}: {}, {}", counted(removed.files, "file"), show(removed.bytes));
        for path in removed.paths.iter().take(LISTED) {
            let _ = writeln!(text, "    {}", printable(path));
        }
        if removed.paths.len() > LISTED {
            let _ = writeln!(text, "    and {} more; --json lists all", removed.paths.len() - LISTED);
        }
        if removed.ignored > 0 {
            let what = if dry { "would keep" } else { "kept" };
            let _ = writeln!(text, "  {what}: {} that {IGNORE_FILE} leaves out", removed.ignored);
        }
    }
    text
}

pub(super) fn would_remove(plan: &RemovePlan, now: bool) -> String {
    let rows: Vec<_> = plan.names.iter().map(|one| vec![one.name.to_string(), show(one.bytes)]).collect();
    format!(
        "{}would remove {}{}\n",
        table(&["NAME", ">SIZE"], &rows),
        counted(plan.names.len() as u64, "name"),
        would_free(plan.freed_bytes, if now { "" } else { "the 7 days that it is kept for, and " })
    )
}

/// Bytes that removing names would free, in words.
fn would_free(bytes: Option<u64>, kept: &str) -> String {
    match bytes {
        Some(bytes) => format!(
            "; `towline collect` could free {} after {kept}its grace (what other names share or are differences to stays)",
            show(bytes)
        ),
        None => "; what that frees cannot be told: a map is damaged (`towline verify`)".to_owned(),
    }
}

pub(super) fn restored_tensors(report: &RestoreTensorsReport) -> String {
    let replaced = match report {
        RestoreTensorsReport { replaced: false, .. } => "",
        RestoreTensorsReport { dry_run: true, .. } => " (would replace one that is there)",
        _ => " (replaced one that was there)",
    };
    format!(
        "{} {}: {} in {}, {}\n  {}: {}{} in {}\n  file: {}{}\n",
        if report.dry_run { "would restore" } else { "restored" },
        report.name,
        show(report.bytes),
        counted(report.tensors, "tensor"),
        seconds(report.seconds),
        if report.dry_run { "would fetch" } else { "fetched" },
        show(report.fetched_bytes),
        by_source(&report.sources),
        counted(report.chunks, "chunk"),
        printable(&report.file),
        replaced,
    )
}

pub(super) fn tensors(tensors: &[TensorListed]) -> String {
    let row = |one: &TensorListed| {
        let [name, dtype, path] = [&one.name, &one.dtype, &one.path].map(|text| printable(text));
        vec![name, dtype, list(&one.shape), show(one.bytes), one.parts.to_string(), path]
    };
    if tensors.is_empty() {
        return String::new();
    }
    table(&["TENSOR", "DTYPE", "SHAPE", ">SIZE", ">PARTS", "FILE"], &tensors.iter().map(row).collect::<Vec<_>>())
}

pub(super) fn watched(event: &WatchEvent) -> String {
    let text = match event {
        WatchEvent::Watching { dir, run } => format!("watching {dir} for steps of {run}"),
        WatchEvent::Restored { entry, report } => {
            format!("restored {} as {entry}: {}, {}", report.name, show(report.bytes), seconds(report.seconds))
        }
        WatchEvent::NotRestored { reason, later: None } => format!("nothing restored: {reason}"),
        WatchEvent::NotRestored { reason, later: Some(later) } => format!(
            "nothing restored: {reason}; the run has a later step, {later}: to continue from it, restore it into an empty folder"
        ),
        WatchEvent::NothingFound { dir, is_checkpoint: true } => {
            format!("no checkpoint in {dir}, which looks like one itself: watch the folder above it")
        }
        WatchEvent::NothingFound { dir, .. } => {
            format!("no checkpoint in {dir}: expected files or folders with the step in their names, as checkpoint-100")
        }
        WatchEvent::Saved { entry, report, by, metrics, .. } => format!(
            "saved {entry} as {}{}: {} in {}, {}; new: {}; finished by {by}{}",
            report.name,
            replaced(report.replaced.as_ref()),
            show(report.logical_bytes),
            counted(report.files, "file"),
            seconds(report.seconds),
            show(report.new_bytes),
            metrics.iter().map(|(name, value)| format!("; {name}={}", number(*value))).collect::<Vec<_>>().concat(),
        ),
        WatchEvent::Kept { entry, name } => format!("{entry} is saved already as {name}"),
        WatchEvent::PassedOver { entry, reason } => format!("passed over {entry}: {reason}"),
        WatchEvent::Gone { entry } => format!("{entry} went away before it was saved"),
        WatchEvent::Failed { entry, failure, retry_seconds } => {
            format!("{entry} could not be saved, next try in {retry_seconds:.1} s: {}", failure.error)
        }
        WatchEvent::HandedOff { entry, to } => format!("{entry} was handed off to {to}"),
        WatchEvent::NotHandedOff { entry, error } => format!("{entry} could not be handed off: {error}"),
        WatchEvent::DirGone { dir } => format!("waiting for {dir}: there is no such folder"),
        WatchEvent::DirBack { dir } => format!("{dir} is there again"),
        WatchEvent::Unreadable { failure } => format!("cannot look: {}", failure.error),
        WatchEvent::Stopping { seconds, pending } if pending.is_empty() => {
            format!("stopping within {seconds:.0} s: all that is finished is saved")
        }
        WatchEvent::Stopping { seconds, pending } => {
            format!("stopping within {seconds:.0} s: still to save: {}", pending.join(", "))
        }
        WatchEvent::Unsaved { entry, reason } => format!("{entry} is not saved: {reason}"),
    };
    format!("{}\n", printable(&text))
}

pub(super) fn refs(refs: &[Listed], long: bool) -> String {
    let short = |one: &Listed| vec![one.name.clone(), show(one.bytes), one.saved.clone()];
    let all = |one: &Listed| {
        let counts = [one.files, one.chunks].map(|count| count.to_string());
        [&short(one)[..], &counts, &[one.manifest.clone(), facts(&one.facts)]].concat()
    };
    if refs.is_empty() {
        String::new()
    } else if long {
        let rows: Vec<_> = refs.iter().map(all).collect();
        table(&["NAME", ">SIZE", "SAVED", ">FILES", ">CHUNKS", "MANIFEST", "FACTS"], &rows)
    } else {
        table(&["NAME", ">SIZE", "SAVED"], &refs.iter().map(short).collect::<Vec<_>>())
    }
}

/// Runs, and below them the steps of the one that comes with them.
pub(super) fn runs(runs: &[RunListed]) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let row = |run: &RunListed| {
        let [count, first, last] = [run.count, run.first, run.last].map(|number| number.to_string());
        vec![run.run.clone(), count, first, last, show(run.bytes), run.saved.clone(), facts(&run.facts)]
    };
    let header = ["RUN", ">STEPS", ">FIRST", ">LAST", ">SIZE", "SAVED", "FACTS"];
    let mut text = table(&header, &runs.iter().map(row).collect::<Vec<_>>());
    for run in runs.iter().filter(|run| !run.steps.is_empty()) {
        text += "\n";
        let rows: Vec<_> = run.steps.iter().map(step).collect();
        text += &table(&[">STEP", "NAME", ">SIZE", "SAVED", "FACTS"], &rows);
    }
    text
}

fn step(step: &StepListed) -> Vec<String> {
    let number = if step.counts { step.step.to_string() } else { format!("({})", step.step) };
    vec![number, step.name.clone(), show(step.bytes), step.saved.clone(), facts(&step.facts)]
}

/// `acc=0.9 loss=0.12 world-size=8 framework=pytorch`, as much of it as is told.
pub(super) fn facts(facts: &StepFacts) -> String {
    let metrics = facts.metrics().map(|(name, value)| format!("{name}={}", number(value)));
    let ranks = facts.ranks().map(|ranks| format!("world-size={ranks}"));
    let framework = facts.written_by().map(|framework| format!("framework={framework}"));
    printable(&metrics.chain(ranks).chain(framework).collect::<Vec<_>>().join(" "))
}

/// As short as it can be read back from.
fn number(value: f64) -> String {
    let plain = value == 0.0 || (1e-4..1e15).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}

pub(super) fn expired(plan: &ExpirePlan, dry_run: bool, kept: bool, freed: Option<u64>) -> String {
    let row = |what: &str, step: &PlannedStep| {
        let mut reasons: Vec<String> = step.reasons.iter().map(ToString::to_string).collect();
        if !step.lacks.is_empty() {
            reasons.push(format!("(has no {})", printable(&step.lacks.join(", "))));
        }
        vec![what.to_owned(), step.name.to_string(), show(step.bytes), reasons.join(" ")]
    };
    let mut steps: Vec<_> = plan.kept.iter().map(|step| ("keep", step)).collect();
    steps.extend(plan.removed.iter().map(|step| (if dry_run { "would remove" } else { "removed" }, step)));
    steps.sort_by_key(|(_, step)| step.step);
    let mut text =
        table(&["", "NAME", ">SIZE", "WHY"], &steps.iter().map(|(what, step)| row(what, step)).collect::<Vec<_>>());
    let _ = writeln!(
        text,
        "{} {} of {} of {}{}",
        if dry_run { "would remove" } else { "removed" },
        plan.removed.len(),
        counted(steps.len() as u64, "step"),
        plan.run,
        if plan.removed.is_empty() {
            String::new()
        } else if dry_run {
            would_free(freed, if kept { "the 7 days that it is kept for, and " } else { "" })
        } else if kept {
            "; `towline undelete` takes one back, for 7 days unless a collect is told otherwise".to_owned()
        } else {
            " for good (--keep-removed would keep them for 7 days); `towline collect` frees what nothing else needs, after its \
             grace (24h)"
                .to_owned()
        },
    );
    text
}

/// `[128, 64]`
pub(super) fn list(numbers: &[u64]) -> String {
    format!("[{}]", numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
}

/// Ratio of plain to stored bytes.
pub(super) fn ratio(bytes: u64, stored: u64) -> String {
    if stored == 0 { "-".to_owned() } else { format!("{:.2}x", bytes as f64 / stored as f64) }
}

/// Writes changes as a table; nothing, if there are none.
pub(super) fn changes<'a, C>(out: &mut dyn io::Write, changes: impl Fn() -> C) -> io::Result<()>
where
    C: Iterator<Item = Change<'a>>,
{
    if changes().next().is_none() {
        return Ok(());
    }
    let row = |change: Change<'_>| {
        let sign = match change.change {
            "added" => "+",
            "removed" => "-",
            "meta" => ".",
            _ => "~",
        };
        let [before, after, new] = [change.bytes_before, change.bytes_after, change.new_bytes].map(show);
        vec![sign.to_owned(), before, after, new, printable(&change.path)]
    };
    write_table(out, &["", ">BEFORE", ">AFTER", ">NEW", "PATH"], || changes().map(row))
}

pub(super) fn sync(report: &SyncReport) -> String {
    let dry = report.dry_run;
    let row = |one: &PlannedName| {
        let what = if one.replaces { "replaces" } else { "new" };
        vec![one.name.to_string(), show(one.bytes), show(one.moved_bytes), what.to_owned()]
    };
    let mut text = String::new();
    if !report.planned.is_empty() {
        text += &table(&["NAME", ">SIZE", ">MOVES", ""], &report.planned.iter().map(row).collect::<Vec<_>>());
    }
    let _ = writeln!(
        text,
        "{} {}, {}\n  {}: {} in {}, bases included; the names hold {}; not moved again: {}",
        if dry { "would sync" } else { "synced" },
        counted(report.names, "name"),
        seconds(report.seconds),
        if dry { "would move" } else { "moved" },
        show(report.moved_bytes),
        counted(report.new_chunks, "chunk"),
        counted(report.chunks, "chunk"),
        show(report.skipped_bytes),
    );
    if !report.replaced.is_empty() {
        let what = if dry { "would replace" } else { "replaced" };
        let names = counted(report.replaced.len() as u64, "name");
        let restores = if report.forgotten == 0 { ", which `undelete --replace` restores" } else { "" };
        let _ = writeln!(text, "  {what}: {names}{restores}");
    }
    if report.forgotten > 0 {
        let what = if dry { "would forget" } else { "forgot" };
        let values = counted(report.forgotten, "old value");
        let _ = writeln!(text, "  {what}: {values} that `undelete` could restore, as too many are kept there");
    }
    if !report.kept.is_empty() {
        let what = if dry { "would keep" } else { "kept" };
        let _ = writeln!(text, "  {what} as there: {}", counted(report.kept.len() as u64, "name"));
        for kept in report.kept.iter().take(LISTED) {
            let why = if kept.reason == KeptReason::Newer { "newer there" } else { "exists there" };
            let _ = writeln!(text, "    {}: {why} (saved {} there, {} here)", kept.name, kept.saved_there, kept.saved);
        }
        if report.kept.len() > LISTED {
            let _ = writeln!(text, "    and {} more; --json lists all", report.kept.len() - LISTED);
        }
    }
    if !report.failed.is_empty() {
        let what = if dry { "cannot copy" } else { "not copied" };
        let _ = writeln!(text, "  {what}: {}", counted(report.failed.len() as u64, "name"));
        for failed in report.failed.iter().take(LISTED) {
            let _ = writeln!(text, "    {}: {}", failed.name, printable(&failed.error));
        }
        if report.failed.len() > LISTED {
            let _ = writeln!(text, "    and {} more; --json lists all", report.failed.len() - LISTED);
        }
    }
    text
}

pub(super) fn verify(report: &VerifyReport, data: bool, paint: Colors) -> String {
    let mut text = format!(
        "{} {} in {} and {}, {}\n",
        if data { "read and checked" } else { "checked the structure of" },
        show(report.bytes),
        counted(report.packs, "pack"),
        counted(report.chunks, "chunk"),
        seconds(report.seconds),
    );
    for damage in &report.damaged {
        write_damage(&mut text, &paint.bad("damaged"), damage);
    }
    for repaired in &report.repaired {
        let _ = writeln!(text, "{} {}", paint.good("repaired"), printable(repaired));
    }
    for damage in &report.left {
        write_damage(&mut text, &paint.bad("still damaged"), damage);
    }
    if report.damaged.is_empty() {
        let _ = writeln!(text, "nothing is damaged");
    } else if !report.repaired.is_empty() && report.left.is_empty() {
        let _ = writeln!(text, "nothing is damaged any more");
    }
    text
}

fn write_damage(text: &mut String, found: &str, damage: &Damage) {
    let _ = writeln!(text, "{found} {}: {}", printable(&damage.what), printable(&damage.error));
    // No name has a colon.
    let mut places: HashMap<&str, Vec<&str>> = HashMap::new();
    for (name, place) in damage.tensors.iter().filter_map(|place| place.split_once(':')) {
        places.entry(name).or_default().push(place);
    }
    for name in &damage.names {
        let _ = writeln!(text, "  hits {name}");
        for place in places.get(name.as_str()).into_iter().flatten() {
            let _ = writeln!(text, "    {}", printable(place));
        }
    }
    if damage.more_names > 0 {
        let _ = writeln!(text, "  hits {}, which are not listed", counted(damage.more_names, "more name"));
    }
}

pub(super) fn collect(report: &CollectReport, dry_run: bool) -> String {
    let mut text = String::new();
    for step in &report.steps {
        let _ = writeln!(text, "{}{}", if dry_run { "would " } else { "" }, printable(step));
    }
    let _ = writeln!(
        text,
        "{} {}; {} live, {}",
        if dry_run { "would free" } else { "freed" },
        show(report.freed_bytes),
        show(report.live_bytes),
        seconds(report.seconds),
    );
    let counts = [
        ("packs condemned", report.condemned_packs),
        ("packs purged", report.purged_packs),
        ("packs repacked", report.repacked_packs),
        ("objects deleted", report.deleted_objects),
        ("index segments merged", report.merged_segments),
        ("sessions fenced", report.fenced_sessions),
    ];
    for (what, count) in counts.iter().filter(|(_, count)| *count > 0) {
        let _ = writeln!(text, "  {what}: {count}");
    }
    text.push_str(&taken_values(report, dry_run));
    if report.waiting_objects > 0 {
        let waiting = counted(report.waiting_objects, "object");
        let _ = writeln!(text, "  kept until their grace is over: {} in {waiting}", show(report.waiting_bytes));
    }
    if report.unused_bytes > 0 {
        let unused = show(report.unused_bytes);
        let _ = writeln!(text, "  kept in packs that are mostly in use: {unused} of unused chunks");
    }
    if report.held_packs > 0 {
        let _ = writeln!(
            text,
            "  kept for open sessions: {} in {}, of saves or syncs that run or were killed",
            show(report.held_bytes),
            counted(report.held_packs, "pack"),
        );
    }
    if report.unfinished_objects > 0 {
        let _ = writeln!(
            text,
            "  kept until they have stood still for 24 h: {} in {} of saves or syncs",
            show(report.unfinished_bytes),
            counted(report.unfinished_objects, "unfinished object"),
        );
    }
    for held in &report.held {
        let name = held.name.as_ref().map_or_else(String::new, |name| format!(" (ranks that save {name})"));
        let ends = held.ends.as_ref().map_or_else(String::new, |ends| format!(", or with a collect after {ends}"));
        let _ = writeln!(
            text,
            "    {}{name}: {} in {}; a save of the same files uses what was indexed; the rest can be freed once the session ends{ends}",
            held.session,
            show(held.bytes),
            counted(held.packs, "pack"),
        );
    }
    text
}

/// Values of removed and replaced names, in words.
fn taken_values(report: &CollectReport, dry_run: bool) -> String {
    let mut text = String::new();
    if report.forgotten_values > 0 {
        let what = if dry_run { "would forget" } else { "forgot" };
        let _ = writeln!(
            text,
            "  {what} what {} held that were removed or replaced",
            counted(report.forgotten_values, "name")
        );
    }
    if report.kept_values > 0 {
        let _ = writeln!(
            text,
            "  kept of removed and replaced names: {} in {} that `towline undelete` can restore",
            show(report.kept_bytes),
            counted(report.kept_values, "value"),
        );
    }
    text
}

pub(super) fn diagnosis(diagnosis: &Diagnosis, paint: Colors) -> String {
    let line = |check: &Check| {
        let outcome = match check.outcome {
            Outcome::Ok => paint.good("ok  "),
            Outcome::Warn => paint.warn("warn"),
            Outcome::Bad => paint.bad("BAD "),
        };
        let mut text = format!("{outcome}  {}", printable(&check.what));
        if !check.detail.is_empty() {
            let _ = write!(text, ": {}", printable(&check.detail));
        }
        text.push('\n');
        if let Some(help) = &check.help {
            let _ = writeln!(text, "      {} {}", paint.faint("help:"), printable(help));
        }
        text
    };
    diagnosis.checks.iter().map(line).collect()
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.1} s")
}

pub(super) fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
