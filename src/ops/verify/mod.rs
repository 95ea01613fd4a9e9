//! Verify: checks that stored data is unchanged, and optionally repairs it.
//!
//! ```text
//! log -> names -> manifests and maps -> pack footers -> index segments [-> every byte of the packs] -> findings [-> repair]
//! ```
//!
//! Only data that names need is checked. Objects that collectors deleted meanwhile are no damage: findings are compared with the
//! state at the end.

mod findings;
mod frames;
mod groups;
mod hits;
mod repair;
mod report;
mod segments;
mod trees;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;

use self::findings::{Findings, Subject};
use self::users::Users;
use crate::budget::GrowingMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PackRef;
use crate::id::{PackId, SegmentId};
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::log::{Accepted, RefValue, State};
use crate::repository::{Repository, layout, no_such_name};

/// Options of a verification.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    /// Read every byte of the packs, not only their footers.
    pub data: bool,
    /// Repair damage where possible.
    pub repair: bool,
    /// Losses that a repair of the log may cause, and a snapshot that it may trust.
    pub accepted: Accepted,
    /// Progress counters.
    pub progress: Progress,
}

/// Result of a verification.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Packs checked.
    pub packs: u64,
    /// Chunks in them.
    pub chunks: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Damage found, before any repair.
    pub damaged: Vec<Damage>,
    /// Descriptions of the repairs.
    pub repaired: Vec<String>,
    /// Damage that a second look found after the repairs.
    pub left: Vec<Damage>,
    /// Log entries whose changes the repair of the log gave up.
    pub lost: Vec<String>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// One damaged object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Object, and chunk of it.
    pub what: String,
    /// Error message.
    pub error: String,
    /// Names that cannot be restored completely; of very many the first ones.
    pub names: Vec<String>,
    /// Number of further such names.
    pub more_names: u64,
    /// Affected tensors and files of `names`, as far as known: `NAME:PATH`, then the tensor after a space. `NAME:...` stands for more.
    pub tensors: Vec<String>,
}

/// One verification in progress.
struct Verifying<'a> {
    repository: &'a Repository,
    options: &'a VerifyOptions,
    /// The state that is verified.
    state: Arc<State>,
    /// The names to verify.
    names: BTreeMap<Name, RefValue>,
    /// Maps that name each pack.
    users: Users,
    /// Packs checked, and whether their footers are intact.
    packs: BTreeMap<PackId, (PackRef, bool)>,
    /// Packs in an intact segment.
    indexed: BTreeSet<PackId>,
    /// Damaged segments, with the packs that they seem to cover.
    bad_segments: BTreeMap<SegmentId, Vec<PackRef>>,
    findings: Findings,
    /// Memory of all of these but the state and the findings.
    memory: GrowingMemory,
}

impl Repository {
    /// Verifies the tree `name`, or the whole repository including log and index. Damage is no error; it is in the report. After
    /// repairs it verifies again.
    ///
    /// # Errors
    /// Not found, if there is no such name; exhausted, if names, packs and damage take more memory than they may; denied, if data is to
    /// be read that the policy denies here; unreachable, if the store is. A repair also fails as commits do.
    ///
    /// # Cancel safety
    /// Safe: each step of a repair is one commit, and the next run finds the rest.
    #[tracing::instrument(skip_all)]
    pub async fn verify(&self, name: Option<&Name>, options: &VerifyOptions) -> Result<VerifyReport> {
        let begun = std::time::Instant::now();
        let mut report = self.verify_once(name, options).await?;
        if options.repair && !report.damaged.is_empty() {
            let again = VerifyOptions { repair: false, ..options.clone() };
            report.left = self.verify_once(name, &again).await?.damaged;
        }
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    async fn verify_once(&self, name: Option<&Name>, options: &VerifyOptions) -> Result<VerifyReport> {
        options.progress.phase("reading the log", 0);
        let mut audit = self.log().audit().await?;
        let mut report = VerifyReport::default();
        if options.repair && !audit.damaged.is_empty() {
            self.salvage(options.accepted, &mut report).await?;
        }
        // Damage is reported as found; the rest is checked against the current state.
        let (all, damaged) = (!audit.folds, std::mem::take(&mut audit.damaged));
        if !report.repaired.is_empty() {
            drop(audit);
            audit = self.log().audit().await?;
        }
        let folds = audit.folds;
        let mut memory = self.budget().keep_growing();
        if name.is_none() {
            memory.add(audit.weight)?;
        }
        let names = match name {
            None => audit.state.refs.clone(),
            Some(name) => audit.state.refs.iter().filter(|(found, _)| *found == name).map(cloned).collect(),
        };
        if let Some(name) = name.filter(|_| names.is_empty() && folds) {
            return Err(no_such_name(&audit.state.refs, name, self.store().location()));
        }
        let mut verifying = Verifying {
            repository: self,
            options,
            state: Arc::clone(&audit.state),
            names,
            users: Users::default(),
            packs: BTreeMap::new(),
            indexed: BTreeSet::new(),
            bad_segments: BTreeMap::new(),
            findings: Findings::new(self.budget().keep_growing()),
            memory,
        };
        for (key, error) in damaged {
            verifying.findings.add(Subject::Log { all }, key.to_string(), error)?;
        }
        verifying.description().await?;
        if folds {
            verifying.run(name.is_none()).await?;
            report.damaged = verifying.settle().await?;
            if options.repair {
                report.repaired.extend(verifying.repair(name.is_none()).await?);
            }
        } else {
            // Without a state nothing else can be checked.
            report.damaged = verifying.damage(&BTreeMap::new());
        }
        let packs = verifying.packs.values().map(|(pack, _)| pack);
        (report.packs, report.chunks, report.bytes) = packs.fold((0, 0, 0), |(packs, chunks, bytes), pack| {
            (packs + 1, chunks + u64::from(pack.chunks), bytes + pack.len)
        });
        Ok(report)
    }
}

impl Verifying<'_> {
    async fn description(&mut self) -> Result<()> {
        let described = self.repository.audit_description().await;
        let key = layout::repository().to_string();
        self.note(Subject::Log { all: true }, key, described).map(drop)
    }

    /// Checks everything; with `whole`, not only the data of one name.
    async fn run(&mut self, whole: bool) -> Result<()> {
        self.check_trees().await?;
        if whole {
            self.check_segments().await?;
        }
        if self.options.data || self.options.repair {
            self.check_readable().await?;
        }
        if self.options.data {
            self.check_frames().await?;
        }
        Ok(())
    }

    /// Refuses to read data if one of the packs holds chunks of a name that the policy denies here, or of such a value that can be
    /// undeleted.
    async fn check_readable(&self) -> Result<()> {
        for denied in self.repository.denied_here(&self.state, self.state.roots()).await? {
            let reached = match self.repository.map(denied.value.map_key).await {
                Ok(map) => map.packs.iter().any(|pack| self.packs.contains_key(&pack.id)),
                // Unknown packs count as shared.
                Err(_) => true,
            };
            if reached {
                return Err(denied.refusal.help(
                    "--data and --repair read what names hold, in packs that names may share: run them at a site that may read all \
                     names, or name those that may be read and share no pack with others",
                ));
            }
        }
        Ok(())
    }

    /// Records damage; other errors end the verification.
    fn note<T>(&mut self, subject: Subject, what: String, read: Result<T>) -> Result<Option<T>> {
        match read {
            Ok(value) => Ok(Some(value)),
            Err(error) if is_damage(&error) => {
                self.findings.add(subject, what, error)?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

fn cloned<A: Clone, B: Clone>((a, b): (&A, &B)) -> (A, B) {
    (a.clone(), b.clone())
}

/// True if a read found damage, which counts only if a second read finds it, too.
fn is_doubtful<T>(read: &Result<T>) -> bool {
    read.as_ref().is_err_and(is_damage)
}

fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Unsupported | ErrorKind::NotFound)
}
