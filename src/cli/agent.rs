//! `towline agent`, and what is asked of one: to warm, pins, the cache.

use std::fmt::Write as _;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use tokio::signal::unix::SignalKind;

use super::args::{AgentVerb, AtOption, CacheVerb, Pin};
use super::config::Route;
use super::listen;
use super::output::{printable, table};
use super::policy::Wanted;
use super::signals::StopRequests;
use super::verbs::Context;
use crate::agent::view::{Cache, CacheChecked, Evicted, PinList, Pinned, Task, Unpinned};
use crate::agent::{Agent, Client, Config, user_name};
use crate::cache::TenantUse;
use crate::error::{Error, ErrorKind, Result};
use crate::placement::SITES_SCHEMA;
use crate::size::show;
use crate::span;

impl AtOption {
    /// Client of the agent to ask.
    ///
    /// # Errors
    /// Not found, if there is no agent here.
    pub(super) fn agent(self) -> Result<Client> {
        Ok(Client::required()?.routed_to(self.at))
    }
}

/// Answer of an agent, and the agent if it is not the one here.
#[derive(Debug, Serialize)]
pub(super) struct AgentAnswer<T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) at: Option<String>,
    #[serde(flatten)]
    pub(super) what: T,
}

impl<T> AgentAnswer<T> {
    pub(super) fn by(agent: &Client, what: T) -> Self {
        Self { at: agent.selector().map(ToString::to_string), what }
    }

    /// ` at SITE/AGENT`, if it is at.
    pub(super) fn place(&self) -> String {
        self.at.as_ref().map_or_else(String::new, |at| format!(" at {}", printable(at)))
    }
}

impl Context {
    /// Carries out `verb`; returns the exit code.
    ///
    /// # Cancel safety
    /// As the command's.
    pub(super) async fn execute_agent_verb(self, verb: AgentVerb) -> Result<u8> {
        match verb {
            AgentVerb::Identity { what } => self.identity(what)?,
            AgentVerb::Agent { config } => self.agent(&config).await?,
            AgentVerb::Policy { what } => return self.policy(what).await,
            AgentVerb::Hint(args) => self.hint(&args).await?,
            AgentVerb::Usage(args) => self.usage(&args).await?,
            AgentVerb::Sites { schema: true, .. } => self.output.print(SITES_SCHEMA.as_bytes())?,
            AgentVerb::Sites { files, check, .. } => self.sites(&files, check).await?,
            AgentVerb::Links { files, measured: false } => self.links(&files).await?,
            AgentVerb::Links { files, measured: true } => self.measured_links(&files).await?,
            AgentVerb::Declassify { name, sensitivity, residency, reason, key } => {
                let wanted = Wanted { sensitivity, residency, reason };
                self.declassify(&name, wanted, &key).await?;
            }
            AgentVerb::Warm(warm) => return self.warm(warm).await,
            AgentVerb::Stage(stage) => self.stage(stage).await?,
            AgentVerb::Pin(pin) => self.pin(pin).await?,
            AgentVerb::Unpin { pins, at } => self.unpin(&pins, at).await?,
            AgentVerb::Pins(at) => self.pins(at).await?,
            AgentVerb::Cache { what } => return self.cache(what).await,
            AgentVerb::Handoff { what } => self.handoff(what).await?,
            AgentVerb::Audit { what } => return self.audit(what).await,
            AgentVerb::Token { what } => self.token(what).await?,
            AgentVerb::Page { port } => self.page(port).await?,
            AgentVerb::Top { ready: true, at, .. } => self.ready(at).await?,
            AgentVerb::Top { once, at, .. } => self.top(once, at).await?,
        }
        Ok(0)
    }

    /// Runs an agent until SIGTERM or SIGINT, and then until it has ended in order; another takes the grace away.
    pub(super) async fn agent(&self, config: &Path) -> Result<()> {
        #[derive(Serialize)]
        struct Listening {
            event: &'static str,
            socket: String,
            #[serde(skip_serializing_if = "Option::is_none")]
            http: Option<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            listen: Option<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            webhook: Option<String>,
        }
        let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let mut asked = async || {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        raise_descriptor_limit();
        let mut config = Config::read(config)?;
        config.memory = self.memory.or(config.memory);
        let agent = tokio::select! {
            agent = Box::pin(Agent::start(config)) => agent?,
            () = asked() => return Err(Error::cancelled("interrupted before the agent was there")),
        };
        let (socket, http) = (agent.socket().display().to_string(), agent.http().map(|http| http.to_string()));
        let listen = agent.listens().map(|listen| listen.to_string());
        let webhook = agent.webhook().map(|webhook| webhook.to_string());
        self.output.event(&Listening { event: "listening", socket, http, listen, webhook }, |listening| {
            let http = listening.http.as_ref().map_or_else(String::new, |http| format!(" and http://{http}"));
            let peers =
                listening.listen.as_ref().map_or_else(String::new, |listen| format!("; other agents at {listen}"));
            let webhook =
                listening.webhook.as_ref().map_or_else(String::new, |webhook| format!("; the API server at {webhook}"));
            format!("listening at {}{http}{peers}{webhook}", printable(&listening.socket))
        })?;
        asked().await;
        let mut requests = StopRequests::default();
        requests.signal();
        let again = async {
            asked().await;
            while requests.signal().is_none() {
                asked().await;
            }
        };
        agent.shut_down(again).await
    }

    /// Shows the progress of a task as if it were this command's own.
    pub(super) fn relay(&self, view: &Task) {
        let before = self.progress.snapshot();
        if before.phase == "warming" && view.progress.phase == "warming" {
            self.progress.grow(view.progress.total.saturating_sub(before.total));
        } else if view.progress.phase == "warming" {
            self.progress.phase("warming", view.progress.total);
        }
        let before = self.progress.snapshot();
        self.progress.advance(view.progress.done.saturating_sub(before.done));
        self.progress.moved(view.progress.moved.saturating_sub(before.moved));
    }

    pub(super) async fn pin(&self, pin: Pin) -> Result<()> {
        #[derive(Serialize)]
        struct Pinning {
            name: String,
            #[serde(rename = "for")]
            lasting: Option<String>,
            owner: String,
            reason: Option<String>,
            repository: Option<String>,
        }
        let Pin { name, lasting, owner, reason, at } = pin;
        if lasting.is_some_and(|lasting| lasting.is_zero()) {
            return Err(Error::usage("pin would have run out already")
                .got("--for 0")
                .help("leave --for out to pin until `towline unpin`"));
        }
        let asked = Pinning {
            name: name.to_string(),
            lasting: lasting.map(span::show),
            owner: owner.unwrap_or_else(user),
            reason,
            repository: self.named_repository()?,
        };
        let (pinned, agent): (Pinned, Client) = at.agent()?.begin("/v1/pins", &asked).await?;
        self.output.report(&AgentAnswer::by(&agent, pinned), |said, _| {
            let until = said.what.expires.as_ref().map_or_else(String::new, |at| format!(" until {at}"));
            // Without a reason, the agent gives the name that the selector stands for.
            let pinned = if asked.reason.is_none() { printable(&said.what.reason) } else { name.to_string() };
            format!("pinned {pinned}{}{until}: {}\n", said.place(), said.what.id)
        })
    }

    pub(super) async fn unpin(&self, pins: &[String], at: AtOption) -> Result<()> {
        #[derive(Serialize)]
        struct All {
            unpinned: Vec<String>,
        }
        let agent = at.agent()?;
        let mut all = All { unpinned: Vec::new() };
        for pin in pins {
            if !pin.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
                return Err(Error::usage("this is not a pin").got(pin).help("`towline pins` lists them"));
            }
            let Unpinned { unpinned } = agent.delete(&format!("/v1/pins/{pin}")).await?;
            all.unpinned.push(unpinned);
        }
        self.output.report(&all, |all, _| format!("unpinned {}\n", printable(&all.unpinned.join(", "))))
    }

    pub(super) async fn pins(&self, at: AtOption) -> Result<()> {
        let pins: PinList = at.agent()?.get("/v1/pins").await?;
        if pins.pins.is_empty() {
            self.output.remark("nothing is pinned");
        }
        self.output.answer(&pins, |pins, _| pinned(&pins.pins))
    }

    pub(super) async fn cache(&self, what: CacheVerb) -> Result<u8> {
        match what {
            CacheVerb::Stat(at) => {
                let cache: Cache = at.agent()?.get("/v1/cache").await?;
                self.output.answer(&cache, |cache, _| figures(cache))?;
            }
            CacheVerb::Check => {
                let agent = Client::required()?;
                let begun: Task = agent.post("/v1/cache/check", &()).await?;
                let line = self.line();
                self.progress.phase("checking", 0);
                let ended = agent.follow(&begun.id, |_| {}).await?;
                drop(line);
                let checked: CacheChecked = serde_json::from_value(ended.report.unwrap_or_default())
                    .map_err(|source| Error::unsupported("answer of the agent is not understood").source(source))?;
                self.output.report(&checked, |checked, _| found(checked))?;
                if !checked.damaged.is_empty() {
                    return Ok(ErrorKind::Damaged.exit_code());
                }
            }
            CacheVerb::Evict { bytes } => {
                let asked = serde_json::json!({ "bytes": bytes });
                let evicted: Evicted = Client::required()?.post("/v1/cache/evict", &asked).await?;
                self.output.report(&evicted, |evicted, _| {
                    let rest =
                        if evicted.freed_bytes < bytes { "; the rest is pinned, or held by running warms" } else { "" };
                    format!("evicted {} of chunks{rest}; the space stays with the cache\n", show(evicted.freed_bytes))
                })?;
            }
        }
        Ok(0)
    }

    /// The repository that somebody named; the agent's usual one, if nobody did.
    pub(super) fn named_repository(&self) -> Result<Option<String>> {
        // Where there is no home folder, nobody named one.
        match self.settings.repository() {
            Ok(Route::Named(location)) => Ok(Some(location.to_string())),
            Ok(Route::Embedded(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Owner of new pins: the user of this process, whatever the environment says.
pub(super) fn user() -> String {
    user_name(rustix::process::getuid())
}

/// The pins as a table.
pub(super) fn pinned(pins: &[Pinned]) -> String {
    let row = |pin: &Pinned| {
        let expires = pin.expires.clone().unwrap_or_else(|| "never".to_owned());
        vec![
            printable(&pin.id),
            printable(&pin.owner),
            expires,
            show(pin.bytes),
            pin.chunks.to_string(),
            pin.created.clone(),
            printable(&pin.reason),
        ]
    };
    let rows: Vec<_> = pins.iter().map(row).collect();
    table(&["PIN", "OWNER", "EXPIRES", ">BYTES", ">CHUNKS", "CREATED", "REASON"], &rows)
}

fn figures(cache: &Cache) -> String {
    let Cache { dir, stat, tenants } = cache;
    let tenants: String = tenants.iter().map(tenant).collect();
    let reads = stat.hits + stat.misses;
    let share = (stat.hits * 100).checked_div(reads).map_or_else(String::new, |share| format!(" ({share} %)"));
    format!(
        "{}\n  holds: {} chunks, {} of {}; slabs {}\n  pinned: {} here, {} promised; pins: {}\n  \
         reads: {} found{share}, {} not\n  put in: {}; evicted: {}; refused: {}; damaged: {}\n{tenants}",
        dir.as_deref().map_or_else(|| "the cache".into(), printable),
        stat.chunks,
        show(stat.bytes),
        show(stat.capacity),
        show(stat.slab_bytes),
        show(stat.pinned_bytes),
        show(stat.promised_bytes),
        stat.pins,
        stat.hits,
        stat.misses,
        stat.inserts,
        stat.evictions,
        stat.refusals,
        stat.damaged,
    )
}

fn tenant(used: &TenantUse) -> String {
    let quota = used.quota.map_or_else(|| "no quota".to_owned(), |quota| format!("of {}", show(quota)));
    format!("  tenant {}: {} {quota}\n", printable(&used.tenant), show(used.bytes))
}

fn found(checked: &CacheChecked) -> String {
    let outcome = match checked.damaged.len() {
        0 => "all good".to_owned(),
        count => format!("{count} damaged and dropped"),
    };
    let mut text = format!("read {} chunks, {}: {outcome}\n", checked.chunks, show(checked.bytes));
    for damage in &checked.damaged {
        // Text takes all that is written to it.
        let _ = writeln!(text, "  {}... in slab {} at {}", printable(&damage.chunk), damage.slab, damage.offset);
    }
    text
}

/// Raises the limit of open files to what the system allows this process: clients, peers, slabs and staged tensors each take some,
/// and the usual limit of 1,024 is one for programs that use select(2).
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(errno) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!("the limit of open files stays at {:?}: {errno}", limit.current);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::view::CacheDamage;
    use crate::cache::CacheStat;

    #[test]
    fn figures_are_told_in_words() {
        let stat = CacheStat { hits: 3, misses: 1, capacity: 1 << 30, ..CacheStat::default() };
        let cache = Cache { dir: Some("/c".into()), stat, tenants: Vec::new() };
        let text = figures(&cache);
        assert!(text.contains("3 found (75 %), 1 not") && text.contains("of 1.0 GiB"), "{text}");
        assert!(figures(&Cache::default()).contains("0 found, 0 not"));
    }

    #[test]
    fn damage_is_named() {
        assert_eq!(found(&CacheChecked::default()), "read 0 chunks, 0 B: all good\n");
        let damaged = vec![CacheDamage { chunk: "00ff".into(), slab: 3, offset: 4096 }];
        let text = found(&CacheChecked { chunks: 1, bytes: 4096, damaged });
        assert_eq!(text, "read 1 chunks, 4.0 KiB: 1 damaged and dropped\n  00ff... in slab 3 at 4096\n");
    }
}
