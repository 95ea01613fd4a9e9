//! Publication of signed heads in the repository, out of reach of those who can change the log.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::head::{Head, SignedHead};
use super::recorder::Recorder;
use crate::error::{ErrorKind, Result};
use crate::identity::Identity;
use crate::repository::Repository;

/// Interval of publications, while there are new entries.
pub const PUBLISH_EVERY: Duration = Duration::from_mins(1);

/// Signs the bytes of a head.
pub type Signer = Arc<dyn Fn(&[u8]) -> Result<Vec<u8>> + Send + Sync>;

/// Other way to publish, if the repository does not let this agent write, or does not answer.
#[async_trait]
pub trait FallbackPublisher: Send + Sync {
    /// Has another agent put `head` into the repository.
    ///
    /// # Errors
    /// Unreachable, if no agent does.
    ///
    /// # Cancel safety
    /// Safe: the head was put or not.
    async fn publish(&self, head: &SignedHead) -> Result<()>;
}

/// Signs `head` and puts it into `repository`, for `identity`; by way of `elsewhere` where the repository refuses.
///
/// # Errors
/// Errors of the signer; denied or unreachable, as the store says.
///
/// # Cancel safety
/// Safe: it may be there or not.
pub async fn publish_head(
    repository: &Repository,
    identity: &Identity,
    head: Head,
    sign: &Signer,
    elsewhere: Option<&dyn FallbackPublisher>,
) -> Result<()> {
    let signature = sign(&head.encode())?;
    let signed = SignedHead { head, signature };
    let put = repository.put_audit_head(identity, signed.head.time, &signed.encode()).await;
    let Err(error) = put else { return Ok(()) };
    let passes = matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unreachable);
    let Some(elsewhere) = elsewhere.filter(|_| passes) else { return Err(error) };
    tracing::debug!("head of the audit log is published by another agent: {error:?}");
    elsewhere.publish(&signed).await
}

/// Publisher of the heads of one log.
pub struct Publisher {
    recorder: Recorder,
    repository: Repository,
    identity: Identity,
    sign: Signer,
    elsewhere: Option<Arc<dyn FallbackPublisher>>,
    /// Number of the last published entry.
    last: u64,
}

impl Publisher {
    /// Creates a publisher of the log that `recorder` writes, in `repository`, for `identity`.
    #[must_use]
    pub fn new(recorder: Recorder, repository: Repository, identity: Identity, sign: Signer) -> Self {
        Self { recorder, repository, identity, sign, elsewhere: None, last: 0 }
    }

    /// Publishes through `elsewhere` if the repository refuses.
    #[must_use]
    pub fn or_by(self, elsewhere: Arc<dyn FallbackPublisher>) -> Self {
        Self { elsewhere: Some(elsewhere), ..self }
    }

    /// Publishes new heads at the interval `every`, until `leaving`; then call [`Publisher::finish`]. Failures are
    /// logged and retried.
    ///
    /// # Cancel safety
    /// Safe: a head is published or not.
    pub async fn run(mut self, every: Duration, leaving: CancellationToken) -> Self {
        while leaving.run_until_cancelled(tokio::time::sleep(every)).await.is_some() {
            if let Err(error) = self.publish().await {
                tracing::error!("cannot publish the head of the audit log, trying again: {error:?}");
            }
        }
        self
    }

    /// Publishes the head, if there are entries since the last one.
    ///
    /// # Errors
    /// As [`Recorder::head`]; denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn publish(&mut self) -> Result<Option<Head>> {
        let head = self.recorder.head().await?;
        self.put(head).await
    }

    /// Closes the log and publishes its last head.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    ///
    /// # Cancel safety
    /// Safe: the log is closed all the same.
    pub async fn finish(mut self) -> Result<Option<Head>> {
        let head = self.recorder.close().await?;
        self.put(head).await
    }

    async fn put(&mut self, head: Head) -> Result<Option<Head>> {
        if head.seq <= self.last {
            return Ok(None);
        }
        let elsewhere = self.elsewhere.as_deref();
        publish_head(&self.repository, &self.identity, head.clone(), &self.sign, elsewhere).await?;
        self.last = head.seq;
        Ok(Some(head))
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("identity", &self.identity).field("last", &self.last).finish_non_exhaustive()
    }
}

/// Passes heads published for `identity` to `each`, the oldest first; an error for a malformed one. All of them, or the
/// `newest` ones. Signatures are not checked.
///
/// # Errors
/// Denied or unreachable, as the store says.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn published(
    repository: &Repository,
    identity: &Identity,
    newest: Option<usize>,
    mut each: impl FnMut(Result<SignedHead>),
) -> Result<()> {
    repository.audit_heads(identity, newest, |body| each(body.and_then(|body| SignedHead::decode(&body)))).await
}
