//! The side of the process that uses staged tensors.

use std::os::fd::OwnedFd;

use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::pass::receive;
use super::stage::StageReport;
use crate::agent::client::{Client, STUCK_AFTER};
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
    /// tensors; unreachable, if no agent answers, or it does not go on.
    ///
    /// # Cancel safety
    /// Safe: the agent continues, and the next request finds the tensors in memory.
    pub async fn stage(&self, request: &StageRequest, tell: impl FnMut(&Task)) -> Result<StagedMemory> {
        let request = StageRequest { hold: true, ..request.clone() };
        let agent = self.unverified();
        agent.health_unless_silent().await?;
        let begun = agent.begin_staging(&request).await?;
        let task = agent.follow(&begun.id, tell).await?;
        let report = StageReport::of(&task)?;
        let id = report.memory.as_ref().ok_or_else(|| Error::other("agent holds no memory").at(&begun.id))?;
        let path = format!("/v1/staged/{id}");
        let upgraded = timeout(STUCK_AFTER, agent.upgraded(&path)).await.unwrap_or_else(|_| Err(agent.stuck()))?;
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

    /// Starts to read tensors into the agent's memory. It only begins a task, so an agent that does not answer soon hangs, whatever it
    /// tells of its state.
    ///
    /// # Errors
    /// As [`Client::post`]; unreachable, if it hangs.
    ///
    /// # Cancel safety
    /// Safe: the agent continues.
    pub async fn begin_staging(&self, request: &StageRequest) -> Result<Task> {
        let begun = timeout(STUCK_AFTER, self.post("/v1/stage", request)).await;
        begun.unwrap_or_else(|_| Err(self.stuck()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixListener;

    use super::*;

    const HEALTH: &str = r#"{"version":"1","pid":1,"started":"","ready":true,"leaving":false,"preemption":null,"identity":null,
        "repositories":[]}"#;
    const TASK: &str = r#"{"id":"A","kind":"stage","name":"n","state":"running","started":"","seconds":0.0,
        "progress":{"phase":"","total":0,"done":0,"moved":0}}"#;

    /// Answers `/health`, and `/v1/stage` if it `begins` tasks, with nothing after the head of the response to anything else.
    async fn hang(mut stream: UnixStream, begins: bool) {
        let (mut request, mut piece) = (Vec::new(), [0; 4096]);
        while !request.windows(4).any(|four| four == b"\r\n\r\n") {
            let read = stream.read(&mut piece).await.unwrap();
            request.extend_from_slice(&piece[..read]);
        }
        let body = match request {
            _ if request.starts_with(b"GET /health ") => HEALTH,
            _ if request.starts_with(b"POST /v1/stage ") && begins => TASK,
            _ if begins => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
                return std::future::pending().await;
            }
            _ => return std::future::pending().await,
        };
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    }

    #[tokio::test]
    async fn an_agent_that_tells_its_state_and_hangs_is_not_waited_for() {
        for begins in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("agent.sock");
            let listener = UnixListener::bind(&socket).unwrap();
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(hang(stream, begins));
                }
            });
            let request = StageRequest { name: "n".to_owned(), ..StageRequest::default() };
            let error = Client::at(&socket).stage(&request, |_| {}).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            assert!(error.to_string().contains("does not go on"), "{error}");
            assert!(error.help_text().unwrap().contains("TOWLINE_AGENT=none"));
        }
    }
}
