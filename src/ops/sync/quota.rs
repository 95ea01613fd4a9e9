//! Quota of what the destination keeps of replaced names: a sync has it forget values only if it is told to. A thief of a saver's
//! key of the source may replace very many names, so that what they replaced first would be forgotten.

use super::{RefValue, Syncing};
use crate::error::Result;
use crate::name::Name;
use crate::repository::log::{Action, Keeping, KeptUse, State};

impl Syncing<'_> {
    /// Treatment of the values that the destination has.
    pub(super) fn keeping(&self) -> Keeping {
        if self.options.forget { Keeping::Quota } else { Keeping::All }
    }

    /// Checks, before anything of the tree `value` moves, that the destination can keep what it has under `name`. The commit
    /// checks it again.
    pub(super) fn check_quota(&self, name: &Name, value: &RefValue) -> Result<()> {
        match self.replaced(name, value) {
            Some(old) if self.keeping() == Keeping::All => self.kept_now().check(name, old),
            _ => Ok(()),
        }
    }

    /// Use of the quota by now: a collect may have freed some since the sync began.
    fn kept_now(&self) -> KeptUse {
        let now = if self.options.dry_run { None } else { self.to.log().last_seen() };
        now.map_or(self.kept, |now| KeptUse::of(&now))
    }

    /// Reports that `name` was set to `value`, if it had another tree.
    pub(super) fn note_replaced(&mut self, name: &Name, value: &RefValue) {
        let Some(old) = self.replaced(name, value).cloned() else { return };
        self.kept.add(&old);
        self.report.replaced.push(name.clone());
    }

    /// Reports how many values the destination forgot for those that were replaced, or in a dry run would.
    pub(super) fn note_forgotten(&mut self) {
        if self.keeping() == Keeping::All || self.report.replaced.is_empty() {
            return;
        }
        self.report.forgotten = if self.options.dry_run {
            would_forget(&self.began, &self.report.replaced)
        } else {
            let Some(now) = self.to.log().last_seen() else { return };
            let replaced = self.report.replaced.iter();
            let taken = replaced.filter_map(|name| Some((name.clone(), self.began.version(name)?)));
            let all = self.began.removed.keys().cloned().chain(taken);
            all.filter(|key| !now.removed.contains_key(key)).count() as u64
        };
    }

    /// The destination's value of `name`, if `value` is another tree.
    fn replaced(&self, name: &Name, value: &RefValue) -> Option<&RefValue> {
        self.began.refs.get(name).filter(|there| there.manifest != value.manifest)
    }
}

/// Number of values, kept or new, that are not kept once `names` are replaced in `state`.
fn would_forget(state: &State, names: &[Name]) -> u64 {
    let actions = state.keep(names);
    let kept = actions.iter().filter(|action| matches!(action, Action::Keep { .. })).count();
    let forgotten = actions.len() - kept;
    (names.len() - kept + forgotten) as u64
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;
    use crate::limits::REMOVED_MAX;
    use crate::ops::{SaveOptions, SyncOptions, UndeleteOptions, sync};
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    /// Two repositories.
    struct Fixture {
        dir: tempfile::TempDir,
        from: Repository,
        to: Repository,
    }

    impl Fixture {
        async fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let open = async || {
                let options = OpenOptions { cache: Some(dir.path().join("cache")), ..OpenOptions::default() };
                Repository::create(Store::memory(), options).await.unwrap().0
            };
            let (from, to) = (open().await, open().await);
            Self { dir, from, to }
        }

        async fn save(&self, content: &str, to: &str) {
            let tree = self.dir.path().join("tree");
            fs::write(&tree, content).unwrap();
            self.from.save(&tree, &name(to), &SaveOptions::default()).await.unwrap();
        }

        /// Makes the destination keep `count` values of names below `m`, as after as many names were replaced.
        async fn use_up(&self, count: usize) {
            let old = self.to.state().await.unwrap().refs[&name("m/model")].clone();
            let set = |n, expected| {
                let value = RefValue { version: 0, saved: Timestamp(0), ..old.clone() };
                Action::SetRef { name: name(&format!("m/x{n}")), expected, value }
            };
            let log = self.to.log();
            log.commit(None, |_| Ok((0..count).map(|n| set(n, None)).collect())).await.unwrap();
            let names: Vec<Name> = (0..count).map(|n| name(&format!("m/x{n}"))).collect();
            let gone = |state: &State| {
                let remove =
                    |name: &Name| Some(Action::RemoveRef { name: name.clone(), expected: state.version(name)? });
                let mut actions = state.keep(&names);
                actions.extend(names.iter().filter_map(remove));
                actions
            };
            log.commit(None, |state| Ok(gone(state))).await.unwrap();
        }
    }

    /// B4: "Without `--forget` a sync has the destination forget no kept value".
    #[tokio::test]
    async fn a_thief_of_a_savers_key_has_nothing_forgotten_in_the_copy() {
        let fixture = Fixture::new().await;
        let Fixture { from, to, .. } = &fixture;
        let names = ["m/model", "m/one", "m/two"];
        for text in names {
            fixture.save(&format!("old {text}"), text).await;
        }
        sync(from, to, &[], &SyncOptions::default()).await.unwrap();
        let old = to.state().await.unwrap().refs[&name("m/model")].manifest;
        fixture.use_up(REMOVED_MAX - 2).await;
        for text in names {
            fixture.save(&format!("new {text}"), text).await;
        }
        fixture.save("further", "m/further").await;
        // One is a further name of a tree that has moved.
        from.copy(&name("m/one"), &name("m/two")).await.unwrap();
        for dry_run in [true, false] {
            let options = SyncOptions { dry_run, ..SyncOptions::default() };
            let report = sync(from, to, &[], &options).await.unwrap();
            let failed: Vec<_> = report.failed.iter().map(|failed| (failed.name.as_str(), failed.kind)).collect();
            assert_eq!(failed, [("m/two", ErrorKind::Exhausted)], "{report:?}");
            assert!(report.failed[0].error.contains("--forget"), "{report:?}");
            assert_eq!((report.replaced.len(), report.names, report.forgotten), (2, 3, 0), "{report:?}");
        }
        assert_eq!(to.state().await.unwrap().removed.len(), REMOVED_MAX);
        // The restored value makes room for the one that it replaces.
        let replace = UndeleteOptions { replace: true, ..UndeleteOptions::default() };
        to.undelete(&name("m/one"), &replace).await.unwrap();
        assert_eq!(to.state().await.unwrap().removed.len(), REMOVED_MAX, "no further value is forgotten");
        let alone = sync(from, to, &[name("m/two")], &SyncOptions::default()).await.unwrap_err();
        assert_eq!(alone.kind(), ErrorKind::Exhausted);
        let options = UndeleteOptions { to: Some(name("again")), ..UndeleteOptions::default() };
        to.undelete(&name("m/model"), &options).await.unwrap();
        assert_eq!(to.state().await.unwrap().refs[&name("again")].manifest, old);
    }

    #[tokio::test]
    async fn a_sync_that_may_forget_reports_what_was_forgotten() {
        let fixture = Fixture::new().await;
        let Fixture { from, to, .. } = &fixture;
        fixture.save("old", "m/model").await;
        fixture.save("old too", "m/other").await;
        sync(from, to, &[], &SyncOptions::default()).await.unwrap();
        fixture.use_up(REMOVED_MAX - 1).await;
        fixture.save("new", "m/model").await;
        fixture.save("new too", "m/other").await;
        for dry_run in [true, false] {
            let options = SyncOptions { dry_run, forget: true, ..SyncOptions::default() };
            let report = sync(from, to, &[], &options).await.unwrap();
            assert_eq!((report.replaced.len(), report.forgotten), (2, 1), "{report:?}");
        }
        assert_eq!(to.state().await.unwrap().removed.len(), REMOVED_MAX);
    }
}
