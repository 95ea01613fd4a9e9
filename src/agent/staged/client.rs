//! The side of the process that uses staged tensors.

use std::os::fd::OwnedFd;

use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::UnixStream;

use super::pass::receive;
use super::stage::StageReport;
use crate::agent::client::Client;
use crate::agent::view::Task;
use crate::error::{Error, ErrorKind, Result};
use crate::staging::{MappedMemory, SealedMemory};

/// Tensors that a process asks for.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StageRequest {
    /// A name, or RUN@CHOICE.
    pub name: String,
    /// Only this file or folder of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Repository, by its location or id; the agent's default one if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// Selectors of tensors, `[PATH:]GLOB[BOX]`; all tensors, if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<String>,
    /// True for a process that takes the memory; set by [`Client::stage`].
    pub hold: bool,
}

/// Tensors in memory of the agent. It keeps them until this is dropped.
#[derive(Debug)]
pub struct StagedMemory {
    /// Report of the task that staged them.
    pub report: StageReport,
    /// The memory.
    pub memory: SealedMemory,
    /// Connection that holds the memory. It belongs to no runtime: a forked process may drop it.
    _lease: std::os::unix::net::UnixStream,
}

impl Client {
    /// As [`Client::stage`], by the agent of [`Client::find`], with the memory mapped. None if there is no agent, it cannot have the
    /// tensors in memory, or they cannot be mapped; the log has the reason.
    ///
    /// # Errors
    /// Damaged, if stored bytes are.
    ///
    /// # Cancel safety
    /// As [`Client::stage`].
    pub async fn find_staged(
        request: &StageRequest,
        tell: impl FnMut(&Task),
    ) -> Result<Option<(StagedMemory, MappedMemory)>> {
        let staged = async {
            let Some(agent) = Self::find()? else { return Ok(None) };
            let staged = agent.stage(request, tell).await?;
            let mapped = staged.memory.map()?;
            Ok(Some((staged, mapped)))
        };
        let staged: Result<_> = staged.await;
        match staged {
            Err(error) if error.kind() != ErrorKind::Damaged => {
                tracing::info!("tensors are read without the agent: {error:?}");
                Ok(None)
            }
            staged => staged,
        }
    }

    /// Has the agent read tensors into memory, or find them there, and takes the memory. `tell` receives the progress.
    ///
    /// # Errors
    /// Unsupported, if the agent keeps no tensors in memory; exhausted, if they do not fit; not found, for the name or the
    /// tensors; unreachable, if no agent answers.
    ///
    /// # Cancel safety
    /// Safe: the agent continues, and the next request finds the tensors in memory.
    pub async fn stage(&self, request: &StageRequest, tell: impl FnMut(&Task)) -> Result<StagedMemory> {
        let request = StageRequest { hold: true, ..request.clone() };
        let agent = self.unverified();
        agent.health_unless_silent().await?;
        let begun: Task = agent.post("/v1/stage", &request).await?;
        let task = agent.follow(&begun.id, tell).await?;
        let report = StageReport::of(&task)?;
        let id = report.memory.as_ref().ok_or_else(|| Error::other("agent holds no memory").at(&begun.id))?;
        let upgraded = agent.upgraded(&format!("/v1/staged/{id}")).await?;
        let parts = upgraded.downcast::<TokioIo<UnixStream>>();
        let parts = parts.map_err(|_| Error::other("connection to the agent is of another kind"))?;
        let received: Result<OwnedFd, _> = receive(parts.io.inner()).await;
        let received = received.map_err(|source| {
            Error::unreachable("agent passes no memory").at(self.socket().display()).source(source)
        })?;
        let lease = parts.io.into_inner().into_std();
        let lease = lease.map_err(|source| Error::other("cannot keep the connection to the agent").source(source))?;
        Ok(StagedMemory { report, memory: SealedMemory::received(received)?, _lease: lease })
    }
}
