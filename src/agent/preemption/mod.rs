//! Preemption notices of cloud providers for spot instances.

mod aws;
mod azure;
mod gcp;
mod metadata;
#[cfg(test)]
mod tests;

use std::time::Duration;

use self::metadata::Metadata;
use crate::clock::Timestamp;
use crate::error::Result;

/// Polling interval: as AWS recommends, and often enough for the 30 seconds that others give.
const EVERY: Duration = Duration::from_secs(5);

/// Provider whose notices are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Amazon EC2.
    Aws,
    /// Google Compute Engine.
    Gcp,
    /// Microsoft Azure.
    Azure,
}

/// Preemption notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    /// Text of the notice.
    pub(super) what: String,
    /// Time of the preemption, if the notice has it.
    pub(super) at: Option<Timestamp>,
}

/// Polls for a notice. Failures are retried; the first one is logged.
///
/// # Cancel safety
/// Safe: it only reads.
pub(super) async fn await_notice(provider: Provider) -> Notice {
    let metadata = Metadata::of_this_machine();
    let mut troubled = false;
    loop {
        match provider.ask(&metadata).await {
            Ok(Some(notice)) => return notice,
            Ok(None) => troubled = false,
            Err(error) if !std::mem::replace(&mut troubled, true) => {
                tracing::warn!(?provider, "metadata service does not say whether the machine stays: {error:?}");
            }
            Err(_) => {}
        }
        tokio::time::sleep(EVERY).await;
    }
}

impl Provider {
    async fn ask(self, metadata: &Metadata) -> Result<Option<Notice>> {
        match self {
            Self::Aws => aws::ask(metadata).await,
            Self::Gcp => gcp::ask(metadata).await,
            Self::Azure => azure::ask(metadata).await,
        }
    }
}
