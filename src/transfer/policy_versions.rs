//! Versions of policies: those that this agent has seen, which it tells its peers, and those that they say they have seen.
//!
//! A peer's word is believed for one thing: to read the repository's log again before the next ruling. A lie costs a read each
//! [`PAUSE`], however often it is told.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::format::wire::{Reader, Writer};
use crate::id::RepositoryId;

/// Repositories in one hello, at most: as many as fit an extension's value.
const TOLD_MAX: usize = 32;
/// Time between two reads for what peers say of one repository, at least.
const PAUSE: Duration = Duration::from_secs(5);
/// Bytes by which a hello names a repository.
const KEY_LEN: usize = 16;

/// A repository in a hello: the first bytes of its id's hash, which tell nothing to a peer that does not know the id.
type Key = [u8; KEY_LEN];

/// Versions by repository.
#[derive(Debug, Default)]
pub(super) struct PolicyVersions(Mutex<BTreeMap<Key, KnownVersion>>);

#[derive(Debug, Default)]
struct KnownVersion {
    /// The highest version that this agent has verified; 0 if none.
    seen: u64,
    announced: Option<AnnouncedVersion>,
}

/// Announcement of a later version by a peer.
#[derive(Debug)]
struct AnnouncedVersion {
    /// Time since which the log must have been read.
    since: Instant,
    /// Time that replaces it once it has passed: another announcement came too soon.
    next: Option<Instant>,
}

impl PolicyVersions {
    /// Notes that the policy of `repository`, which is one of this agent's, had `version`; 0: it is not known yet.
    pub(super) fn record_version(&self, repository: RepositoryId, version: u64) {
        let mut all = self.all();
        let known = all.entry(key(repository)).or_default();
        known.seen = known.seen.max(version);
    }

    /// The highest versions that were seen, as a hello tells them; none, if there are none.
    pub(super) fn announcement_to_send(&self) -> Option<Vec<u8>> {
        let all = self.all();
        let mut value = Writer::new();
        for (key, known) in all.iter().filter(|(_, known)| known.seen > 0).take(TOLD_MAX) {
            value.bytes(key).varint(known.seen);
        }
        (!value.is_empty()).then(|| value.into_bytes())
    }

    /// Takes in what a peer tells. Repositories that are not this agent's are passed over, and so is what is malformed.
    pub(super) fn record_announcement(&self, value: &[u8], now: Instant) {
        let mut reader = Reader::new(value);
        let mut all = self.all();
        while reader.remaining() > 0 {
            let Ok((key, version)) = reader.array::<KEY_LEN>().and_then(|key| Ok((key, reader.varint()?))) else {
                return;
            };
            if let Some(known) = all.get_mut(&key)
                && version > known.seen
            {
                known.record_announcement(now);
            }
        }
    }

    /// Time since which the log of `repository` must have been read before something is ruled by it; none: any time.
    pub(super) fn announced(&self, repository: RepositoryId, now: Instant) -> Option<Instant> {
        let mut all = self.all();
        let known = all.get_mut(&key(repository))?;
        // Also once the version was seen: whoever saw it may not be whoever rules now.
        let announced = known.announced.as_mut()?;
        if let Some(next) = announced.next.take_if(|next| *next <= now) {
            announced.since = next;
        }
        Some(announced.since)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<Key, KnownVersion>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownVersion {
    fn record_announcement(&mut self, now: Instant) {
        let Some(announced) = &mut self.announced else {
            self.announced = Some(AnnouncedVersion { since: now, next: None });
            return;
        };
        let next = announced.since + PAUSE;
        if now >= next {
            (announced.since, announced.next) = (now, None);
        } else {
            announced.next = Some(next);
        }
    }
}

fn key(repository: RepositoryId) -> Key {
    let mut key = Key::default();
    key.copy_from_slice(&blake3::hash(&repository.to_bytes()).as_bytes()[..KEY_LEN]);
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::protocol::limits::EXTENSION_LEN_MAX;

    fn announcement(repository: RepositoryId, version: u64) -> Vec<u8> {
        let versions = PolicyVersions::default();
        versions.record_version(repository, version);
        versions.announcement_to_send().unwrap()
    }

    #[test]
    fn a_later_version_wants_a_read_and_an_older_one_does_not() {
        let (own, other) = (RepositoryId::random(), RepositoryId::random());
        let (versions, now) = (PolicyVersions::default(), Instant::now());
        versions.record_version(own, 0);
        assert_eq!(versions.announcement_to_send(), None);
        versions.record_version(own, 3);
        for version in [1, 3] {
            versions.record_announcement(&announcement(own, version), now);
            assert_eq!(versions.announced(own, now), None);
        }
        versions.record_announcement(&announcement(other, 9), now);
        assert_eq!((versions.announced(own, now), versions.announced(other, now)), (None, None), "it is none of ours");
        versions.record_announcement(&announcement(own, 4), now);
        assert_eq!(versions.announced(own, now), Some(now));
        versions.record_version(own, 4);
        let later = now + 2 * PAUSE;
        versions.record_announcement(&announcement(own, 4), later);
        assert_eq!(versions.announced(own, later), Some(now), "it was seen: no other read is wanted");
        assert_eq!(versions.announcement_to_send(), Some(announcement(own, 4)));
    }

    #[test]
    fn a_lie_costs_a_read_in_five_seconds_at_most_and_nothing_malformed_counts() {
        let (own, begun) = (RepositoryId::random(), Instant::now());
        let versions = PolicyVersions::default();
        versions.record_version(own, 1);
        let mut reads = std::collections::BTreeSet::new();
        for n in 0..1000 {
            let now = begun + Duration::from_millis(20 * n);
            versions.record_announcement(&announcement(own, u64::MAX - n), now);
            let since = versions.announced(own, now).unwrap();
            assert!(since <= now && now.duration_since(since) <= PAUSE);
            reads.insert(since);
        }
        assert_eq!(reads.len(), 4, "in 20 s");
        let quiet = PolicyVersions::default();
        quiet.record_version(own, 1);
        let good = announcement(own, 7);
        for end in 1..good.len() {
            quiet.record_announcement(&good[..end], begun);
            assert_eq!(quiet.announced(own, begun), None);
        }
        for n in 0..100 {
            quiet.record_version(RepositoryId::random(), u64::MAX - n);
        }
        assert!(quiet.announcement_to_send().unwrap().len() <= EXTENSION_LEN_MAX);
    }
}
