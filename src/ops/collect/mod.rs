//! Collect: deletes data that no name needs, by plans that a dry run can show.

mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;

pub use self::report::{CollectReport, HeldSession};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::{MapKey, PackId, SessionId};
use crate::progress::Progress;
use crate::repository::collect::{
    Cutoff, EntryTimes, Judgement, KEEP_REMOVED, KeepUntil, Marks, NO_SPACE, SweepCandidates, Unneeded, delete_all,
    judge, leftovers, mark, outlived, repack, store_time,
};
use crate::repository::layout::{Family, Numbered};
use crate::repository::log::{Action, LogEntry, State};
use crate::repository::{IndexedPacks, Repository, layout};
use crate::storage::{StagingFile, UnfinishedUpload, staging_files};
use crate::work::blocking;

/// Time without a write, by the store's clock, after which a session is ended. No grace period shortens it.
const FENCE_AFTER: Duration = Duration::from_hours(24);
/// Entries that a truncation keeps, so that few readers have to start over.
const LOG_KEEP: u64 = 64;
/// Values that one log entry forgets, at most.
const FORGOTTEN_MAX: usize = 1 << 14;
/// Live segments above which a collect merges some.
const SEGMENTS_GOOD: usize = 8;

/// Options of a collect.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// Only report what would be done.
    pub dry_run: bool,
    /// Time that an object is kept after a collect found it unneeded, by the store's clock. It avoids retries of slow readers and
    /// writers, and leaves time to notice the misuse of a stolen key. Safety with concurrent writers does not depend on it.
    pub grace: Duration,
    /// Time for which the values of removed and replaced names are kept and can be restored, by the store's clock. The
    /// grace begins after it.
    pub keep_removed: Duration,
    /// Progress counters.
    pub progress: Progress,
}

impl Default for CollectOptions {
    fn default() -> Self {
        let (grace, progress) = (Duration::from_hours(24), Progress::default());
        Self { dry_run: false, grace, keep_removed: KEEP_REMOVED, progress }
    }
}

/// Input of a judgement.
struct Evidence {
    state: Arc<State>,
    packs: IndexedPacks,
    marks: Marks,
}

impl Repository {
    /// Deletes data that no name needs. With a grace of zero, one call condemns, marks again, purges and deletes.
    ///
    /// # Errors
    /// Damaged, if the log is, or a name's map cannot be read: nothing is condemned, purged or deleted then.
    ///
    /// # Cancel safety
    /// Safe: the next collect continues.
    #[tracing::instrument(skip_all)]
    pub async fn collect(&self, options: &CollectOptions) -> Result<CollectReport> {
        let collected = match self.try_collect(options).await {
            Err(error) if self.has_made_room(&error).await => self.try_collect(options).await,
            collected => collected,
        };
        if collected.is_ok() && !options.dry_run {
            self.store().keep_reserve().await;
        }
        collected
    }

    async fn try_collect(&self, options: &CollectOptions) -> Result<CollectReport> {
        let begun = std::time::Instant::now();
        self.check_log().await?;
        options.progress.phase("listing", 0);
        let listed = leftovers(self).await?;
        let mut report = CollectReport::default();
        if options.dry_run {
            self.rehearse(&listed, options, &mut report).await?;
        } else {
            self.execute(&listed, options, &mut report).await?;
        }
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Replays the stored log, to verify its newest snapshot, which decides what is unneeded.
    async fn check_log(&self) -> Result<()> {
        match self.log().audit().await?.damaged.into_iter().next() {
            Some((_, error)) => Err(Error::damaged("nothing can be collected: the log is damaged")
                .help(
                    error
                        .help_text()
                        .unwrap_or("`towline verify` lists the damage, and `--repair` repairs the log")
                        .to_owned(),
                )
                .source(error)),
            None => Ok(()),
        }
    }

    async fn rehearse(
        &self,
        listed: &SweepCandidates,
        options: &CollectOptions,
        report: &mut CollectReport,
    ) -> Result<()> {
        // The store's clock costs a write to read: a dry run goes by this machine's.
        let now = self.clock().now();
        let forgotten = self.due_to_forget(options, Some(now), report).await?;
        let evidence = self.evidence(&options.progress, forgotten).await?;
        let cutoff = options.cutoff(Some(now));
        let mut judgement = evidence.judge(listed, cutoff);
        self.leave_denied(&evidence, &mut judgement, report).await?;
        judgement.measure(|pack| listed.pack_len(pack));
        let mut times = EntryTimes::new(self);
        judgement.fence = listed.stalled(&mut times, &evidence.state, now.before(FENCE_AFTER)).await?;
        report.report_live(&evidence);
        report.count(&judgement);
        report.steps.extend(judgement.describe());
        let unneeded = evidence.unneeded(listed, cutoff);
        report.deleted_objects = unneeded.due.len() as u64;
        report.report_unneeded(&unneeded);
        let ending = judgement.fence.iter().map(|(session, _)| *session).collect();
        report.report_held(listed.held(&mut times, &evidence.state, &evidence.marks).await?, &evidence, &ending);
        let unfinished = self.unfinished(now).await?;
        report.report_unfinished(&unfinished);
        // Packs that would be purged count as waiting.
        let mut gone: BTreeMap<PackId, u64> = judgement.purge.iter().map(|&(pack, _, len)| (pack, len)).collect();
        if options.grace.is_zero() {
            // A pack that is rewritten is deleted, too.
            gone.extend(judgement.condemn.iter().chain(&judgement.repack).map(|pack| (pack.id, pack.len)));
        }
        report.freed_bytes += gone.values().sum::<u64>();
        let waiting =
            unneeded.waiting.iter().filter(|((family, id), _)| *family != Family::Pack || !gone.contains_key(id));
        (report.waiting_objects, report.waiting_bytes) =
            waiting.fold((0, 0), |(n, bytes), (_, len)| (n + 1, bytes + len));
        Ok(())
    }

    async fn execute(
        &self,
        listed: &SweepCandidates,
        options: &CollectOptions,
        report: &mut CollectReport,
    ) -> Result<()> {
        // A new log entry shows the store's time.
        let session = SessionId::random();
        let opened = self.log().commit(Some(session), |_| Ok(vec![Action::Open(session)])).await?;
        let store_now = store_time(self, opened.entry.unwrap_or(0)).await?;
        let cutoff = options.cutoff(store_now);
        if let Some(last) = self.due_to_forget(options, store_now, report).await? {
            self.forget_through(session, last).await?;
        }

        let evidence = self.evidence(&options.progress, None).await?;
        let mut judgement = evidence.judge(listed, cutoff);
        self.leave_denied(&evidence, &mut judgement, report).await?;
        self.leave_without_space(&evidence, &mut judgement, report).await;
        let mut times = EntryTimes::new(self);
        if let Some(store_now) = store_now {
            judgement.fence = listed.stalled(&mut times, &evidence.state, store_now.before(FENCE_AFTER)).await?;
        }
        let mut first = Judgement { purge: Vec::new(), ..judgement };
        options.progress.phase("repacking", first.repack.iter().map(|pack| evidence.marks.used_bytes(&pack.id)).sum());
        let repacked = repack(self, &evidence.state, &evidence.marks, &first.repack, &options.progress).await?;
        first.repack.retain(|pack| !repacked.left.contains_key(&pack.id));
        if let Some(why) = repacked.left.values().next() {
            report.steps.push(format!("leave {} mostly unused packs: {why}", repacked.left.len()));
        }
        self.commit_still_right(session, first.actions()).await?;
        report.count(&first);
        report.steps.extend(first.describe());

        // Marks again, from a state in which all packs to purge are condemned already. Only one marking is in memory.
        drop(evidence);
        let evidence = self.evidence(&options.progress, None).await?;
        let again = evidence.judge(listed, cutoff);
        let second = Judgement { purge: again.purge, pardon: again.pardon, ..Judgement::default() };
        self.commit_still_right(session, second.actions()).await?;
        report.count(&second);
        report.steps.extend(second.describe());
        drop(evidence);
        self.rebuild_index(session, report).await?;

        let evidence = self.evidence(&options.progress, None).await?;
        report.report_live(&evidence);
        report.report_held(
            listed.held(&mut times, &evidence.state, &evidence.marks).await?,
            &evidence,
            &BTreeSet::new(),
        );
        let unneeded = evidence.unneeded(listed, cutoff);
        self.delete_due(session, listed, &evidence, &unneeded).await?;
        report.report_unneeded(&unneeded);
        report.deleted_objects += unneeded.due.len() as u64;
        listed.list_unneeded(self, session, &unneeded).await?;
        if let Some(store_now) = store_now {
            let unfinished = self.unfinished(store_now).await?;
            self.sweep(&unfinished).await?;
            report.report_unfinished(&unfinished);
        }
        self.log().commit(Some(session), |_| Ok(vec![Action::Close(session)])).await?;
        report.deleted_objects += self.log().truncate(LOG_KEEP, cutoff.limit()).await?;
        Ok(())
    }

    /// Drops from the plan the repacking of packs with content that the policy denies here: it would be read here.
    async fn leave_denied(
        &self,
        evidence: &Evidence,
        judgement: &mut Judgement,
        report: &mut CollectReport,
    ) -> Result<()> {
        if judgement.repack.is_empty() {
            return Ok(());
        }
        let denied = self.denied_here(&evidence.state, evidence.state.roots()).await?;
        let Some(first) = denied.first() else { return Ok(()) };
        let maps: BTreeSet<MapKey> = denied.iter().map(|denied| denied.value.map_key).collect();
        let before = judgement.repack.len();
        judgement.repack.retain(|pack| !evidence.marks.maps_of(pack.id).any(|map| maps.contains(&map)));
        let left = before - judgement.repack.len();
        if left > 0 {
            report.steps.push(format!("leave {left} mostly unused packs: {}", first.refusal));
        }
        Ok(())
    }

    /// Drops from the plan the repacking for which the disk of the repository has too little space.
    async fn leave_without_space(&self, evidence: &Evidence, judgement: &mut Judgement, report: &mut CollectReport) {
        let needed: u64 = judgement.repack.iter().map(|pack| evidence.marks.used_bytes(&pack.id)).sum();
        let left = judgement.repack.len();
        if left > 0 && self.store().free_bytes().await.is_some_and(|free| free < needed) {
            judgement.repack.clear();
            report.steps.push(format!("leave {left} mostly unused packs: {NO_SPACE}"));
        }
    }

    /// Newest entry whose kept values of removed names were kept for long enough, if it is `now`; they are reported. A store that does
    /// not tell the time forgets nothing but what is not to be kept at all.
    async fn due_to_forget(
        &self,
        options: &CollectOptions,
        now: Option<Timestamp>,
        report: &mut CollectReport,
    ) -> Result<Option<u64>> {
        let until = match now {
            _ if options.keep_removed.is_zero() => KeepUntil::Now,
            Some(now) => KeepUntil::TakenBefore(now.before(options.keep_removed)),
            None => return Ok(None),
        };
        let state = self.state().await?;
        let last = outlived(self, &state, until).await?;
        if let Some(last) = last {
            report.log_forgotten(&state, last);
        }
        Ok(last)
    }

    /// Forgets the values that entries up to `last` kept, some with each commit: an entry of all of them would take as much memory again
    /// as the state.
    async fn forget_through(&self, session: SessionId, last: u64) -> Result<()> {
        loop {
            let commit = self.log().commit(Some(session), |state| {
                let due = state.kept_through(last).take(FORGOTTEN_MAX);
                Ok(due.map(|(key, removed)| removed.forget(key)).collect())
            });
            if commit.await?.state.kept_through(last).next().is_none() {
                return Ok(());
            }
        }
    }

    /// Reads the state, the index and the maps, as if what entries up to `forgotten` kept were forgotten.
    async fn evidence(&self, progress: &Progress, forgotten: Option<u64>) -> Result<Evidence> {
        progress.phase("marking", 0);
        loop {
            let (now, index) = self.indexed_state().await?;
            let state = without(&now, forgotten);
            match mark(self, &state).await {
                Ok(marks) => return Ok(Evidence { packs: index.packs(self.budget())?, state, marks }),
                // A map that is missing because its name moved on meanwhile says nothing.
                Err(error) => {
                    let newest = self.state().await?;
                    if newest.refs == now.refs && newest.removed == now.removed {
                        return Err(error);
                    }
                    tracing::debug!("marking again: {error:?}");
                }
            }
        }
    }

    /// Commits the `actions` that the newest state still allows; other processes may have done the rest.
    async fn commit_still_right(&self, session: SessionId, actions: Vec<Action>) -> Result<()> {
        let commit = self.log().commit(Some(session), |state| {
            let allowed = |action: &&Action| {
                let (write, at) = (crate::id::WriteId::random(), self.clock().now());
                let entry = LogEntry { write, session: Some(session), at, actions: vec![(*action).clone()] };
                state.check(&entry).is_ok()
            };
            Ok(actions.iter().filter(allowed).cloned().collect())
        });
        commit.await.map(drop)
    }

    /// Deletes objects that are due, and records in the log which purged packs are deleted, also by an earlier collector.
    async fn delete_due(
        &self,
        session: SessionId,
        listed: &SweepCandidates,
        evidence: &Evidence,
        unneeded: &Unneeded,
    ) -> Result<()> {
        delete_all(self, unneeded.due.keys().map(|&(family, id)| layout::owned(family, id)).collect()).await?;
        let is_gone = |pack: &PackId| {
            let item = (Family::Pack, *pack);
            unneeded.due.contains_key(&item) || !listed.has(&item) && !evidence.marks.uses(pack)
        };
        let purged = evidence.state.purged.iter().filter(|(_, purged)| !purged.deleted);
        let gone: Vec<PackId> = purged.map(|(pack, _)| *pack).filter(is_gone).collect();
        if gone.is_empty() {
            return Ok(());
        }
        let commit = self.log().commit(Some(session), |state| {
            let known = gone.iter().filter(|pack| state.purged.contains_key(pack)).copied().collect::<Vec<_>>();
            Ok(if known.is_empty() { Vec::new() } else { vec![Action::Deleted(known)] })
        });
        commit.await.map(drop)
    }

    /// Rebuilds segments that list purged packs, and merges small ones.
    async fn rebuild_index(&self, session: SessionId, report: &mut CollectReport) -> Result<()> {
        let (state, index) = self.indexed_state().await?;
        let old = index.to_rebuild(&state, SEGMENTS_GOOD);
        for group in old {
            report.merged_segments += group.len() as u64;
            if let Err(error) = self.merge(&state, group, session).await {
                tracing::info!("index segments are left to the next collect: {error:?}");
            }
        }
        Ok(())
    }

    /// Unfinished uploads and files of this repository's writers. Their age is measured by the store's clock: by another clock, a
    /// new upload might seem old.
    async fn unfinished(&self, store_now: Timestamp) -> Result<Unfinished> {
        let mut unfinished = Unfinished::default();
        if let Some(bucket) = self.store().bucket() {
            let uploads = bucket.unfinished_uploads(layout::is_uploaded_in_parts).await?;
            (unfinished.stale_uploads, unfinished.uploads) =
                uploads.into_iter().partition(|upload| store_now.since(upload.initiated) >= FENCE_AFTER);
        }
        if let Some(root) = self.store().directory() {
            let root = root.to_owned();
            let files = blocking(move || staging_files(&root, is_leftover)).await?;
            (unfinished.stale_files, unfinished.files) =
                files.into_iter().partition(|file| store_now.since(file.modified) >= FENCE_AFTER);
        }
        Ok(unfinished)
    }

    /// Deletes stale files and uploads.
    async fn sweep(&self, unfinished: &Unfinished) -> Result<()> {
        if let Some(bucket) = self.store().bucket() {
            bucket.abort_uploads(&unfinished.stale_uploads).await?;
        }
        let files = unfinished.stale_files.clone();
        blocking(move || files.iter().try_for_each(StagingFile::remove)).await
    }
}

/// Unfinished uploads and files. Stale ones have been idle for so long that their writer must be dead.
#[derive(Debug, Default)]
struct Unfinished {
    uploads: Vec<UnfinishedUpload>,
    stale_uploads: Vec<UnfinishedUpload>,
    files: Vec<StagingFile>,
    stale_files: Vec<StagingFile>,
}

/// True if a staging file belongs to this repository, and is safe to remove: see [`StagingFile::remove`]. A repository inside
/// this one's folder handles its own files.
fn is_leftover(file: &StagingFile) -> bool {
    let key = Path::from(file.key.as_str());
    let owned = Family::ALL.into_iter().any(|family| layout::owner(family, &key).is_some());
    let numbered = [Numbered::Entry, Numbered::Snapshot, Numbered::Boundary];
    owned
        || layout::is_tombstone(&key)
        || file.published && numbered.into_iter().any(|kind| kind.number(&key).is_some())
}

/// `state`, but for values that entries up to `forgotten` kept.
fn without(state: &Arc<State>, forgotten: Option<u64>) -> Arc<State> {
    let mut state = Arc::clone(state);
    if let Some(last) = forgotten {
        Arc::make_mut(&mut state).removed.retain(|_, removed| removed.at > last);
    }
    state
}

impl Evidence {
    fn judge(&self, listed: &SweepCandidates, cutoff: Cutoff) -> Judgement {
        judge(&self.state, &self.packs, &self.marks, listed.packs_due(cutoff))
    }

    fn unneeded(&self, listed: &SweepCandidates, cutoff: Cutoff) -> Unneeded {
        listed.unneeded(&self.state, &self.packs, &self.marks, cutoff)
    }
}

impl CollectOptions {
    /// Frees at once all that no name needs: with no grace, and nothing kept of removed names.
    #[must_use]
    pub fn at_once() -> Self {
        Self { grace: Duration::ZERO, keep_removed: Duration::ZERO, ..Self::default() }
    }

    /// Time before which what is deleted must have been found unneeded, if it is `now`. A store that does not tell the time deletes
    /// nothing but what needs no grace.
    fn cutoff(&self, now: Option<Timestamp>) -> Cutoff {
        if self.grace.is_zero() {
            return Cutoff::NoGrace;
        }
        Cutoff::Before(now.map_or(Timestamp(i64::MIN), |now| now.before(self.grace)))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::ops::SaveOptions;
    use crate::repository::OpenOptions;
    use crate::repository::faults::{Fault, FaultyStore};
    use crate::storage::Store;
    use crate::tree::MemoryFile;

    /// Without the check of commits, the collect would forget the value again and again, for ever.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_collect_ends_whose_store_loses_what_it_is_to_forget() {
        let (objects, dir) = (Arc::new(FaultyStore::default()), tempfile::tempdir().unwrap());
        let options = OpenOptions { cache: Some(dir.path().to_owned()), ..OpenOptions::default() };
        let repository = Repository::create(Store::from_objects(Arc::clone(&objects) as _), options).await.unwrap().0;
        let (a, file) = ("a".parse().unwrap(), MemoryFile::new("a", [Bytes::from_static(b"a")]));
        repository.save(vec![file], &a, &SaveOptions::default()).await.unwrap();
        repository.remove(&a).await.unwrap();
        // The next entry opens the session of the collect, and the one after it is to forget the value.
        let forgets = repository.state().await.unwrap().seq + 2;
        objects.set(Numbered::Entry.key(forgets), Fault::Lose);
        let error = repository.collect(&CollectOptions::at_once()).await.unwrap_err();
        assert!(error.to_string().contains("store lost a log entry that it acknowledged"), "{error}");
        assert!(error.place().unwrap().contains(&forgets.to_string()), "{error}");
    }
}
