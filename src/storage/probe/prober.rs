//! The requests of a probe.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error as StoreError, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::judge::{self, Answer, Round, Stored};
use super::{Capabilities, Effort, Verdict};
use crate::error::{Error, ErrorKind, Result};
use crate::storage::{Bucket, Store};

/// Maximum tries of a request that fails.
const TRIES: usize = 3;

/// Maximum number of keys that are listed: more than a probe writes.
const KEYS_MAX: usize = 1000;

/// A probe in progress, under its own prefix.
pub(super) struct Prober {
    objects: Arc<dyn ObjectStore>,
    bucket: Option<Bucket>,
    root: Path,
}

impl Prober {
    pub(super) fn new(store: &Store) -> Self {
        Self { objects: Arc::clone(store.objects()), bucket: store.bucket().cloned(), root: super::scratch() }
    }

    pub(super) async fn run(&self, effort: Effort) -> Result<Capabilities> {
        let key = self.key("plain");
        let body = Bytes::from_static(b"0123456789");
        self.objects.put(&key, body.clone().into()).await?;
        let read_after_write = found(self.read(&key).await? == Some(body.clone()));
        let list_after_write = found(self.list().await?.contains(&key));
        let ranges = match self.objects.get_range(&key, 3..7).await {
            Ok(part) if part == body.slice(3..7) => Verdict::Works,
            Ok(_) => Verdict::Ignored,
            Err(_) => Verdict::Refused,
        };
        let (update, unquoted_etags) = self.update().await?;
        Ok(Capabilities {
            create: self.create(effort).await?,
            update,
            delete: self.delete(unquoted_etags).await?,
            ranges,
            read_after_write,
            list_after_write,
            unquoted_etags,
        })
    }

    /// Removes the objects of the probe, as far as the store allows.
    pub(super) async fn sweep(&self) {
        let keys = self.objects.list(Some(&self.root)).map_ok(|meta| meta.location).take(KEYS_MAX).boxed();
        let mut deleted = self.objects.delete_stream(keys);
        while let Some(outcome) = deleted.next().await {
            if let Err(error) = outcome {
                tracing::warn!(%error, at = %self.root, "what the probe wrote could not be removed");
            }
        }
    }

    fn key(&self, name: &str) -> Path {
        self.root.clone().join(name)
    }

    async fn read(&self, key: &Path) -> Result<Option<Bytes>> {
        match self.objects.get(key).await {
            Ok(got) => Ok(Some(got.bytes().await?)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn list(&self) -> Result<Vec<Path>> {
        let keys = self.objects.list(Some(&self.root)).map_ok(|meta| meta.location);
        Ok(keys.take(KEYS_MAX).try_collect().await?)
    }

    /// Writer whose bytes are at `key`.
    async fn stored(&self, key: &Path, bodies: &[Bytes]) -> Result<Stored> {
        Ok(match self.read(key).await? {
            None => Stored::Nothing,
            Some(found) => bodies.iter().position(|body| *body == found).map_or(Stored::Other, Stored::Of),
        })
    }

    async fn create(&self, effort: Effort) -> Result<Verdict> {
        match self.create_twice().await? {
            Verdict::Works => {}
            weaker => return Ok(weaker),
        }
        let (rounds, racers) = effort.races();
        let mut outcomes = Vec::with_capacity(rounds);
        for round in 0..rounds {
            // Small bodies test the condition, larger ones also the publication of the body.
            let len = if round % 2 == 0 { 1 << 10 } else { 64 << 10 };
            outcomes.push(self.race(&self.key(&format!("race-{round}")), racers, len).await?);
        }
        Ok(judge::races(&outcomes))
    }

    async fn create_twice(&self) -> Result<Verdict> {
        for attempt in 0..TRIES {
            let key = self.key(&format!("twice-{attempt}"));
            let bodies = [body(0, 100), body(1, 100)];
            let [first, second] = &bodies;
            let answers = (
                put(&self.objects, &key, first.clone(), PutMode::Create).await?,
                put(&self.objects, &key, second.clone(), PutMode::Create).await?,
            );
            let stored = self.stored(&key, &bodies).await?;
            if let Some(verdict) = judge::twice(answers.0, answers.1, stored) {
                return Ok(verdict);
            }
        }
        Ok(Verdict::Unclear)
    }

    async fn race(&self, key: &Path, racers: usize, len: usize) -> Result<Round> {
        let bodies: Vec<Bytes> = (0..racers).map(|racer| body(racer, len)).collect();
        let start = Arc::new(Barrier::new(racers));
        let mut running = JoinSet::new();
        for (racer, body) in bodies.iter().cloned().enumerate() {
            let (objects, key, start) = (Arc::clone(&self.objects), key.clone(), Arc::clone(&start));
            running.spawn(async move {
                start.wait().await;
                (racer, put(&objects, &key, body, PutMode::Create).await)
            });
        }
        let mut answers = vec![Answer::Failed; racers];
        while let Some(joined) = running.join_next().await {
            let (racer, answer) = joined.map_err(|e| Error::other("a racer of the probe died").source(e))?;
            if let Some(slot) = answers.get_mut(racer) {
                *slot = answer?;
            }
        }
        Ok(judge::round(&answers, self.stored(key, &bodies).await?))
    }

    /// Tests conditional updates, with quoted and with bare `ETag`s.
    async fn update(&self) -> Result<(Verdict, bool)> {
        let quoted = self.update_as(str::to_owned).await?;
        if quoted != Verdict::Refused {
            return Ok((quoted, false));
        }
        match self.update_as(bare).await? {
            Verdict::Works => Ok((Verdict::Works, true)),
            _ => Ok((quoted, false)),
        }
    }

    async fn update_as(&self, spell: fn(&str) -> String) -> Result<Verdict> {
        let key = self.key("update");
        let Some((old, current)) = self.two_tags(&key).await? else { return Ok(Verdict::Refused) };
        let expecting = |tag: &str| PutMode::Update(UpdateVersion { e_tag: Some(spell(tag)), version: None });
        let stale = put(&self.objects, &key, body(2, 50), expecting(&old)).await?;
        let fresh = put(&self.objects, &key, body(3, 50), expecting(&current)).await?;
        Ok(judge::condition(stale, fresh))
    }

    async fn delete(&self, unquoted: bool) -> Result<Verdict> {
        let Some(bucket) = &self.bucket else { return Ok(Verdict::Untried) };
        let key = self.key("delete");
        let Some((old, current)) = self.two_tags(&key).await? else { return Ok(Verdict::Refused) };
        let spell = |tag: &str| if unquoted { bare(tag) } else { tag.to_owned() };
        let stale = answer_of(bucket.delete_if_match(key.as_ref(), &spell(&old)).await)?;
        let gone = self.read(&key).await?.is_none();
        let stale = if gone { Answer::Done } else { stale };
        let fresh = answer_of(bucket.delete_if_match(key.as_ref(), &spell(&current)).await)?;
        Ok(judge::condition(stale, fresh))
    }

    /// Writes `key` twice; returns the old and the new `ETag`, if the store has any.
    async fn two_tags(&self, key: &Path) -> Result<Option<(String, String)>> {
        let old = self.objects.put(key, body(0, 50).into()).await?.e_tag;
        let current = self.objects.put(key, body(1, 50).into()).await?.e_tag;
        Ok(old.zip(current).filter(|(old, current)| old != current))
    }
}

fn found(seen: bool) -> Verdict {
    if seen { Verdict::Works } else { Verdict::Ignored }
}

fn bare(tag: &str) -> String {
    tag.trim_matches('"').to_owned()
}

/// A body of which every part identifies the writer.
fn body(writer: usize, len: usize) -> Bytes {
    format!("writer {writer:04} ").into_bytes().into_iter().cycle().take(len).collect::<Vec<u8>>().into()
}

/// Answer to a conditional put. Refused credentials end the probe, because they say nothing about conditions.
async fn put(objects: &Arc<dyn ObjectStore>, key: &Path, body: Bytes, mode: PutMode) -> Result<Answer> {
    match objects.put_opts(key, PutPayload::from(body), mode.into()).await {
        Ok(_) => Ok(Answer::Done),
        Err(error) => answer_of(Err(error.into())),
    }
}

fn answer_of(outcome: Result<()>) -> Result<Answer> {
    let Err(error) = outcome else { return Ok(Answer::Done) };
    match error.kind() {
        ErrorKind::Conflict | ErrorKind::NotFound => Ok(Answer::Conflict),
        ErrorKind::Unsupported => Ok(Answer::Unsupported),
        ErrorKind::Denied | ErrorKind::Exhausted => Err(error),
        _ => Ok(Answer::Failed),
    }
}
