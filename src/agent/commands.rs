//! Publication of the heads of the audit log of commands and programs on this node.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::getuid;
use tokio::time::timeout;

use super::audit::signer;
use super::client::Client;
use super::user::user_name;
use crate::audit::{CommandLog, Head, HeadPublisher, publish_head};
use crate::error::{Error, Result};
use crate::repository::Repository;
use crate::transfer::policy::{config_folder, machine};
use crate::work::blocking;

/// Time that the agent, or the store, has to publish a head.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(10);

/// The audit log in `folder` of this user's operations without an agent. Its heads are signed and published by the agent of this node;
/// without one, they are signed with the certificate of this machine, if it has one, and put into the repository of the command.
#[must_use]
pub fn command_log(folder: PathBuf) -> CommandLog {
    CommandLog::new(folder, user_name(getuid())).published_by(Arc::new(OnThisNode))
}

/// Publication by the agent of this node, else with this machine's certificate.
#[derive(Debug)]
struct OnThisNode;

#[async_trait]
impl HeadPublisher for OnThisNode {
    async fn publish(&self, repository: &Repository, head: &Head) -> Result<()> {
        let late = |_| Err(Error::unreachable("head of the audit log is not published in time"));
        let by_agent = timeout(PUBLISHED_WITHIN, by_agent(head)).await.unwrap_or_else(late);
        if matches!(by_agent, Ok(true)) {
            return Ok(());
        }
        match timeout(PUBLISHED_WITHIN, by_machine(repository, head)).await.unwrap_or_else(late) {
            // No key on this machine can sign it.
            Ok(false) => by_agent.map(drop),
            published => published.map(drop),
        }
    }
}

/// Has the agent of this node publish `head`; false if there is none.
async fn by_agent(head: &Head) -> Result<bool> {
    let Some(agent) = Client::find()? else { return Ok(false) };
    let (log, hash) = (head.log.to_string(), head.hash.to_string());
    let asked = serde_json::json!({ "log": log, "origin": head.origin, "seq": head.seq, "hash": hash });
    agent.post::<serde_json::Value>("/v1/audit/heads", &asked).await.map(|_| true)
}

/// Signs `head` with the certificate of this machine and puts it into `repository`; false if it has none.
async fn by_machine(repository: &Repository, head: &Head) -> Result<bool> {
    let Some(credentials) = blocking(|| machine(config_folder().as_deref())).await? else { return Ok(false) };
    publish_head(repository, &credentials.identity(), head.clone(), &signer(&credentials), None).await?;
    Ok(true)
}
