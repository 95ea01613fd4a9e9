//! `towline page`: the agent's page in a browser, over its socket.

use std::time::Duration;

use serde::Serialize;
use tokio::signal::unix::SignalKind;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::listen;
use super::verbs::Context;
use crate::agent::view::Health;
use crate::agent::{Client, PageServer};
use crate::error::Result;

/// Time that requests of the browser have to end.
const ENDING_WITHIN: Duration = Duration::from_secs(2);

impl Context {
    /// Serves the page until Ctrl-C or SIGTERM.
    ///
    /// # Cancel safety
    /// Safe: connections of the browser are dropped.
    pub(super) async fn page(&self, port: u16) -> Result<()> {
        #[derive(Serialize)]
        struct Listening {
            event: &'static str,
            url: String,
        }
        let agent = Client::required()?;
        // An error now, and not in the browser.
        agent.get::<Health>("/health").await?;
        let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let server = PageServer::listen(agent, port).await?;
        let url = server.url();
        self.output.answer(&Listening { event: "listening", url }, |listening, _| {
            format!("{}\nCtrl-C ends it. The address is a secret: it shows what you may see.\n", listening.url)
        })?;
        let ending = CancellationToken::new();
        let mut served = std::pin::pin!(server.run(ending.clone()));
        tokio::select! {
            () = &mut served => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        ending.cancel();
        // A browser may keep its connection.
        let _ = timeout(ENDING_WITHIN, served).await;
        Ok(())
    }
}
