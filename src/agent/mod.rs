//! The agent: a daemon on a node, with a cache, repositories, links to other agents, and an API on a Unix socket and on loopback.
//!
//! ```text
//! config -> house (what it holds open: repositories, cache, exchange, transfers) -> doors (the API, peers)
//! client                                                                            the API from the other side
//! custody                                                  checkpoints of agents that may not live to save them
//! ```
//!
//! It is left in order: nothing new is taken, what runs has the grace, then is stopped; the doors close last.

mod client;
mod config;
mod custody;
mod dial;
mod doors;
mod elsewhere;
mod errands;
mod files;
mod folders;
mod house;
mod notice;
mod rules;
mod sidecar;
mod socket;
mod transfers;
mod user;
pub mod view;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures::FutureExt as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

pub use self::client::Client;
pub use self::config::{
    Accepts, Allowance, CacheConfig, CallerPins, Config, CustodyConfig, PeersConfig, SidecarConfig, Watched,
};
use self::custody::{Keeping, keep};
use self::doors::{Callers, Door, Local, router, serve};
pub use self::elsewhere::At;
use self::house::House;
pub use self::notice::Provider;
use self::socket::Claimed;
pub use self::socket::well_known;
pub use self::user::user_name;
use self::view::Standing;
use crate::error::{Error, Result};
use crate::ops::Stop;
use crate::transfer::exchange::Exchange;
use crate::transfer::peers::discover;
use crate::transfer::{Holdings, not_bound, quic, tcp};
use crate::work::blocking;

/// Protocol that a connection is upgraded to for chunks.
const PROTOCOL: &str = "towline";
/// The header by which a request says that it is for another agent, and an answer which one gave it.
const AT: &str = "towline-at";
/// The part of the grace that those who watch folders have.
const WATCH_PART: f64 = 0.9;
/// Time that stopped work and connections have to end.
const LETTING_GO: Duration = Duration::from_secs(3);

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    house: Arc<House>,
    doors: JoinSet<()>,
    socket: PathBuf,
    http: Option<SocketAddr>,
    listen: Option<SocketAddr>,
    grace: Duration,
    /// Last: the socket's file goes when everything else has.
    _claimed: Claimed,
}

impl Agent {
    /// Opens what `config` names, and the doors. Within a runtime.
    ///
    /// # Errors
    /// Conflict, if another agent has the socket, another process the port or the cache; not found, for a repository that is not
    /// there; usage, denied, exhausted: as said.
    ///
    /// # Cancel safety
    /// Safe: nothing is left but empty folders.
    pub async fn start(config: Config) -> Result<Self> {
        // First what tells two agents apart.
        let (claimed, unix) = Claimed::listen(&config.socket)?;
        let tcp = match config.http {
            Some(address) => Some(listen(address).await?),
            None => None,
        };
        let token = if tcp.is_some() { Some(socket::write_token(&config.socket)?) } else { None };
        let house = Arc::new(House::open(&config).await?);
        let to_give = config.custody.as_ref().map(|custody| custody.accept.clone()).unwrap_or_default();
        let token_file = socket::token_path(&config.socket);
        let token = token.as_deref().map(|token| (token, token_file.as_path()));
        let router =
            router(Arc::clone(&house), token, config.open_metrics, Callers { to_ask: config.callers, to_give });
        let (mut doors, leaving) = (JoinSet::new(), house.leaving.clone());
        let listen = match config.listen {
            Some(address) => Some(open_to_peers(&house, address, &router, &mut doors).await?),
            None => None,
        };
        if let (Some(discovery), Ok(exchange)) = (house.discovery(&config.peers), house.exchange()) {
            doors.spawn(discover(Arc::clone(exchange.peers()), discovery, leaving.clone()));
        }
        let http = match tcp {
            Some(listener) => {
                let address = listener.local_addr().ok();
                doors.spawn(serve(listener, |_| Door::Loopback, router.clone(), leaving.clone()));
                address
            }
            None => None,
        };
        doors.spawn(serve(Local(unix), Door::Socket, router, leaving.clone()));
        if let Some((shelf, custody)) = house.shelf.clone().zip(config.custody) {
            let keeping = Keeping { wait: custody.wait, tries: custody.tries };
            let (kept, leaving) = (keep(Arc::clone(&house), shelf, keeping), house.leaving.clone());
            doors.spawn(leaving.run_until_cancelled_owned(kept).map(drop));
        }
        doors.spawn(house.leaving.clone().run_until_cancelled_owned(Arc::clone(&house.rules).keep_up()).map(drop));
        sidecar::begin(&house, config.sidecar, &mut doors)?;
        tracing::info!(socket = %config.socket.display(), "agent is there");
        Ok(Self { house, doors, socket: config.socket, http, listen, grace: config.grace, _claimed: claimed })
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Loopback address of its API, if it has one.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Address for other agents, if they may connect.
    #[must_use]
    pub fn listens(&self) -> Option<SocketAddr> {
        self.listen
    }

    /// Takes nothing new, lets what runs go on for the grace or until `hurry`, stops the rest, and closes the doors.
    ///
    /// # Errors
    /// Cancelled, if something had to be stopped or failed meanwhile; it is named.
    ///
    /// # Cancel safety
    /// Safe, and abrupt: as if the process were killed.
    pub async fn leave(mut self, hurry: impl Future<Output = ()>) -> Result<()> {
        tracing::info!(grace = ?self.grace, "agent is asked to end");
        let (transfers, grace) = (&self.house.transfers, self.house.time_left(self.grace));
        transfers.close();
        // They end by themselves, a little before they would be stopped.
        self.house.stop.send_replace(Stop::Within { grace: grace.mul_f64(WATCH_PART), linger: true });
        let under_way = transfers.running();
        tokio::select! {
            () = transfers.ended() => {}
            () = tokio::time::sleep(grace) => {}
            () = hurry => {}
        }
        under_way.iter().for_each(|transfer| transfer.stop());
        // What does not let go is left behind with the process.
        let _ = timeout(LETTING_GO, transfers.ended()).await;
        self.house.leaving.cancel();
        self.house.attended.close();
        let closed = async {
            self.house.attended.wait().await;
            while self.doors.join_next().await.is_some() {}
        };
        let _ = timeout(LETTING_GO, closed).await;
        if let Ok(cache) = self.house.cache() {
            blocking(move || cache.sync()).await?;
        }
        let ends = under_way.iter().map(|transfer| transfer.view());
        let lost: Vec<String> = ends.filter(|view| view.state != Standing::Done).map(|view| lost(&view)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        Err(Error::cancelled("the agent ended before all transfers were done")
            .got(lost.join("; "))
            .help("begin them again: what arrived is used; or give the agent more `grace`"))
    }
}

/// Listens for other agents at `address`, over TCP and QUIC: the same port for both. Over TCP they may ask the API, too.
async fn open_to_peers(
    house: &House,
    address: SocketAddr,
    router: &Router,
    doors: &mut JoinSet<()>,
) -> Result<SocketAddr> {
    let credentials = house.credentials()?;
    let exchange = house.exchange()?;
    let mut tcp = tcp::Listener::bind(address, credentials.clone()).await?.through(house.gate.clone());
    let address = tcp.address()?;
    let quic = quic::Listener::bind(address, credentials.clone())?.through(house.gate.clone());
    let (holdings, leaving): (Arc<dyn Holdings>, _) = (Arc::<Exchange>::clone(exchange), house.leaving.clone());
    doors.spawn(serve(tcp.take_calls(), Door::Remote, router.clone(), leaving.clone()));
    doors.spawn(quic.serve(Arc::clone(&holdings), leaving.clone()).map(ended));
    doors.spawn(tcp.serve(holdings, leaving).map(ended));
    Ok(address)
}

/// A transfer that did not do what it should, in words.
fn lost(view: &view::Transfer) -> String {
    let message = view.error.as_ref().and_then(|error| error.get("message")).and_then(|message| message.as_str());
    format!("{} {}: {}", view.kind.word(), view.name, message.unwrap_or("stopped when the grace was over"))
}

/// A door that closes by itself is worth a word.
fn ended(result: Result<()>) {
    if let Err(error) = result {
        tracing::error!("other agents are not served any more: {error:?}");
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|source| not_bound(source, address))
}
