//! `towline page`: the agent's page in a browser, over its socket.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use tokio::signal::unix::SignalKind;
use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;

use super::listen;
use super::verbs::Context;
use crate::agent::{Client, PageServer};
use crate::error::Result;

/// Time that requests of the browser have to end.
const ENDING_WITHIN: Duration = Duration::from_secs(2);

/// Interval of looks whether somebody can read standard output.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Returns when nobody can read standard output any more, such as when the `ssh` that runs this has ended. Never for a file.
async fn output_closed() {
    let mut ticks = interval(LOOK_EVERY);
    loop {
        ticks.tick().await;
        let output = io::stdout();
        let mut looked_at = [PollFd::new(&output, PollFlags::empty())];
        // Errors are told whether they are asked for or not (<https://man7.org/linux/man-pages/man2/poll.2.html>).
        let found = poll(&mut looked_at, Some(&Timespec::default()));
        if found.is_ok() && looked_at[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
            return;
        }
    }
}

impl Context {
    /// Serves the page until Ctrl-C or SIGTERM, or until its output is closed.
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
        agent.health().await?;
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
            () = output_closed() => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        ending.cancel();
        // A browser may keep its connection.
        let _ = timeout(ENDING_WITHIN, served).await;
        Ok(())
    }
}
