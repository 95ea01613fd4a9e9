//! Collect: frees what no name needs, by plans that can be shown before they are carried out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use serde::Serialize;

use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::{PackId, SessionId};
use crate::progress::Progress;
use crate::repository::collect::{
    Cutoff, Judgement, Leftovers, Marks, Unneeded, delete_all, judge, leftovers, mark, repack, store_time,
};
use crate::repository::layout::{Family, Numbered};
use crate::repository::log::{Action, LogEntry, State};
use crate::repository::{IndexedPacks, Repository, layout};
use crate::storage::{StagingFile, staging_files};
use crate::work::blocking;

/// A session that has written nothing for this long, by the store's clock, is over. No grace period shortens it.
const FENCE_AFTER: Duration = Duration::from_hours(24);
/// Entries that a truncation leaves, so that few readers have to start over.
const LOG_KEEP: u64 = 64;
/// Live segments above which a collect merges some.
const SEGMENTS_GOOD: usize = 8;

/// Options of a collect.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// Only say what would be done.
    pub dry_run: bool,
    /// Time that an object is kept after a collect found that nothing needs it, by the store's clock. It spares slow readers and
    /// writers extra work, and leaves time to notice what a stolen key did; against other writers nothing's safety depends on it.
    pub grace: Duration,
    /// Progress counters.
    pub progress: Progress,
}

impl Default for CollectOptions {
    fn default() -> Self {
        Self { dry_run: false, grace: Duration::from_hours(24), progress: Progress::default() }
    }
}

/// Result of a collect, or of a dry run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CollectReport {
    /// Packs condemned.
    pub condemned_packs: u64,
    /// Packs purged.
    pub purged_packs: u64,
    /// Objects deleted.
    pub deleted_objects: u64,
    /// Packs rewritten because they were mostly dead.
    pub repacked_packs: u64,
    /// Index segments merged or rebuilt.
    pub merged_segments: u64,
    /// Sessions ended because they stood still.
    pub fenced_sessions: u64,
    /// Bytes of the objects deleted.
    pub freed_bytes: u64,
    /// Stored bytes of the chunks in use.
    pub live_bytes: u64,
    /// Objects that nothing needs and whose grace is not over.
    pub waiting_objects: u64,
    /// Bytes of these objects.
    pub waiting_bytes: u64,
    /// Packs that no name uses and that are kept all the same, because a save or sync that is under way may need them.
    pub held_packs: u64,
    /// Bytes of these packs.
    pub held_bytes: u64,
    /// The open sessions that they belong to.
    pub held: Vec<HeldSession>,
    /// Steps that were done, or would be, in words.
    pub steps: Vec<String>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// An open session with packs that no name uses: of a save or sync that runs, or was killed.
#[derive(Clone, Debug, Serialize)]
pub struct HeldSession {
    /// Its id.
    pub session: String,
    /// The name that ranks save in it together, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Packs.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// From when on a collect ends it, RFC 3339, unless it goes on or is resumed. None, if the store does not tell times.
    pub ends: Option<String>,
}

/// Everything that a judgement is made from.
struct Evidence {
    state: Arc<State>,
    packs: IndexedPacks,
    marks: Marks,
}

impl Repository {
    /// Frees what no name needs. With a grace of zero, one call condemns, marks again, purges and deletes.
    ///
    /// # Errors
    /// Damaged, if the log is, or a name's map cannot be read: then nothing is condemned, purged or deleted.
    ///
    /// # Cancel safety
    /// Safe: the next collect goes on where this one was.
    #[tracing::instrument(skip_all)]
    pub async fn collect(&self, options: &CollectOptions) -> Result<CollectReport> {
        let begun = std::time::Instant::now();
        self.check_log().await?;
        options.progress.phase("listing", 0);
        let listed = leftovers(self).await?;
        let mut report = CollectReport::default();
        if options.dry_run {
            self.rehearse(&listed, options, &mut report).await?;
        } else {
            self.carry_out(&listed, options, &mut report).await?;
        }
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Replays what is kept of the log: what is unneeded is told from its newest snapshot, which must follow from the entries.
    async fn check_log(&self) -> Result<()> {
        match self.log().audit().await?.damaged.into_iter().next() {
            Some((_, error)) => Err(Error::damaged("nothing can be collected: the log is damaged")
                .help("towline verify tells what is, and what helps")
                .source(error)),
            None => Ok(()),
        }
    }

    async fn rehearse(&self, listed: &Leftovers, options: &CollectOptions, report: &mut CollectReport) -> Result<()> {
        let evidence = self.evidence(&options.progress).await?;
        // The store's clock costs a write to read: a dry run goes by this machine's.
        let now = self.clock().now();
        let cutoff = options.cutoff(Some(now));
        let mut judgement = evidence.judge(listed, cutoff);
        judgement.fence = listed.stalled(self, &evidence.state, before(now, FENCE_AFTER)).await?;
        report.live_bytes = evidence.marks.live_bytes();
        report.count(&judgement);
        report.steps = judgement.describe();
        let unneeded = evidence.unneeded(listed, cutoff);
        report.deleted_objects = unneeded.due.len() as u64;
        report.tell(&unneeded);
        self.tell_held(listed, &evidence, &judgement.fence, report).await?;
        // Packs that would be purged are among what waits.
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

    async fn carry_out(&self, listed: &Leftovers, options: &CollectOptions, report: &mut CollectReport) -> Result<()> {
        // An entry of its own tells the store's time.
        let session = SessionId::random();
        let opened = self.log().commit(Some(session), |_| Ok(vec![Action::Open(session)])).await?;
        let store_now = store_time(self, opened.entry.unwrap_or(0)).await?;
        let cutoff = options.cutoff(store_now);

        let evidence = self.evidence(&options.progress).await?;
        let mut judgement = evidence.judge(listed, cutoff);
        if let Some(store_now) = store_now {
            judgement.fence = listed.stalled(self, &evidence.state, before(store_now, FENCE_AFTER)).await?;
        }
        let first = Judgement { purge: Vec::new(), ..judgement.clone() };
        options.progress.phase("repacking", first.repack.iter().map(|pack| evidence.marks.used_bytes(&pack.id)).sum());
        repack(self, &evidence.state, &evidence.marks, &first.repack, &options.progress).await?;
        self.commit_still_right(session, first.actions()).await?;
        report.count(&first);
        report.steps.extend(first.describe());

        // A new marking, from a state in which everything to be purged was condemned already. One at a time is in memory.
        drop(evidence);
        let evidence = self.evidence(&options.progress).await?;
        let again = evidence.judge(listed, cutoff);
        let second = Judgement { purge: again.purge, pardon: again.pardon, ..Judgement::default() };
        self.commit_still_right(session, second.actions()).await?;
        report.count(&second);
        report.steps.extend(second.describe());
        drop(evidence);
        self.rebuild_index(session, report).await?;

        let evidence = self.evidence(&options.progress).await?;
        report.live_bytes = evidence.marks.live_bytes();
        self.tell_held(listed, &evidence, &[], report).await?;
        let unneeded = evidence.unneeded(listed, cutoff);
        self.delete_due(session, listed, &evidence, &unneeded).await?;
        report.tell(&unneeded);
        report.deleted_objects += unneeded.due.len() as u64;
        listed.list_unneeded(self, session, &unneeded).await?;
        if let Some(store_now) = store_now {
            self.sweep_unfinished(store_now, report).await?;
        }
        self.log().commit(Some(session), |_| Ok(vec![Action::Close(session)])).await?;
        report.deleted_objects += self.log().truncate(LOG_KEEP, cutoff.limit()).await?;
        Ok(())
    }

    /// Tells what open sessions keep from being freed, but for those that are `ending`.
    async fn tell_held(
        &self,
        listed: &Leftovers,
        evidence: &Evidence,
        ending: &[(SessionId, u64)],
        report: &mut CollectReport,
    ) -> Result<()> {
        let mut held = listed.held(self, &evidence.state, &evidence.marks).await?;
        held.retain(|held| ending.iter().all(|(session, _)| *session != held.session));
        for held in held {
            let joint = evidence.state.sessions.get(&held.session).and_then(|session| session.joint.as_ref());
            report.held_packs += held.packs;
            report.held_bytes += held.bytes;
            report.held.push(HeldSession {
                session: held.session.to_string(),
                name: joint.map(|joint| joint.attempt.name.to_string()),
                packs: held.packs,
                bytes: held.bytes,
                ends: held.alive.map(|alive| after(alive, FENCE_AFTER).to_string()),
            });
        }
        Ok(())
    }

    async fn evidence(&self, progress: &Progress) -> Result<Evidence> {
        progress.phase("marking", 0);
        loop {
            let (state, index) = self.indexed_state().await?;
            match mark(self, &state).await {
                Ok(marks) => return Ok(Evidence { packs: index.packs(self.budget())?, state, marks }),
                // A map that is missing because its name moved on meanwhile says nothing.
                Err(error) if self.state().await?.refs == state.refs => return Err(error),
                Err(error) => tracing::debug!("marking again: {error:?}"),
            }
        }
    }

    /// Commits those of `actions` that the newest state still allows: what somebody else did meanwhile is none of ours.
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

    /// Deletes what is due, and says in the log which purged packs are gone: also those that an earlier collector deleted.
    async fn delete_due(
        &self,
        session: SessionId,
        listed: &Leftovers,
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

    /// Uploads and files that some writer of this repository began and never finished. Their age is told by the store's clock:
    /// by another's, an upload that has just begun may look old.
    async fn sweep_unfinished(&self, store_now: Timestamp, report: &mut CollectReport) -> Result<()> {
        if let Some(bucket) = self.store().bucket() {
            let aborted = bucket.abort_unfinished_uploads(layout::is_uploaded_in_parts, store_now, FENCE_AFTER).await?;
            report.deleted_objects += aborted.len() as u64;
        }
        if let Some(root) = self.store().directory() {
            let root = root.to_owned();
            let swept = blocking(move || {
                let mut files = staging_files(&root, store_now, FENCE_AFTER)?;
                files.retain(is_leftover);
                files.iter().try_for_each(StagingFile::remove)?;
                Ok((files.len() as u64, files.iter().map(|file| file.len).sum::<u64>()))
            });
            let (files, bytes) = swept.await?;
            report.deleted_objects += files;
            report.freed_bytes += bytes;
        }
        Ok(())
    }
}

/// Whether a staging file has the shape of this repository's, and nobody can publish another's bytes by it: see
/// [`StagingFile::remove`]. A repository inside this one's folder looks after its own.
fn is_leftover(file: &StagingFile) -> bool {
    let key = Path::from(file.key.as_str());
    let owned = Family::ALL.into_iter().any(|family| layout::owner(family, &key).is_some());
    let numbered = [Numbered::Entry, Numbered::Snapshot, Numbered::Boundary];
    owned
        || layout::is_tombstone(&key)
        || file.published && numbered.into_iter().any(|kind| kind.number(&key).is_some())
}

impl Evidence {
    fn judge(&self, listed: &Leftovers, cutoff: Cutoff) -> Judgement {
        judge(&self.state, &self.packs, &self.marks, listed.packs_due(cutoff))
    }

    fn unneeded(&self, listed: &Leftovers, cutoff: Cutoff) -> Unneeded {
        listed.unneeded(&self.state, &self.packs, &self.marks, cutoff)
    }
}

impl CollectOptions {
    /// Time before which what is deleted must have been found unneeded, if it is `now`. A store that does not tell the time deletes
    /// nothing but what needs no grace.
    fn cutoff(&self, now: Option<Timestamp>) -> Cutoff {
        if self.grace.is_zero() {
            return Cutoff::NoGrace;
        }
        Cutoff::Before(now.map_or(Timestamp(i64::MIN), |now| before(now, self.grace)))
    }
}

impl CollectReport {
    fn count(&mut self, judgement: &Judgement) {
        self.condemned_packs += (judgement.condemn.len() + judgement.repack.len()) as u64;
        self.purged_packs += judgement.purge.len() as u64;
        self.repacked_packs += judgement.repack.len() as u64;
        self.fenced_sessions += judgement.fence.len() as u64;
    }

    fn tell(&mut self, unneeded: &Unneeded) {
        self.freed_bytes += unneeded.due.values().sum::<u64>();
        self.waiting_objects += unneeded.waiting.len() as u64;
        self.waiting_bytes += unneeded.waiting.values().sum::<u64>();
        let deleted = unneeded.due.keys().filter(|(family, _)| *family != Family::Pack);
        self.steps
            .extend(deleted.map(|&(family, id)| format!("delete {}: nothing names it", layout::owned(family, id))));
    }
}

fn after(now: Timestamp, span: Duration) -> Timestamp {
    Timestamp(now.0.saturating_add(i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)))
}

fn before(now: Timestamp, span: Duration) -> Timestamp {
    Timestamp(now.0.saturating_sub(i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)))
}
