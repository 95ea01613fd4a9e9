//! Work that takes time: begun, looked at, followed, stopped.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::Stream;
use serde::Deserialize;

use super::auth::Caller;
use super::error::{ApiError, JsonBody};
use crate::agent::Pinning;
use crate::agent::config::Span;
use crate::agent::state::AgentState;
use crate::agent::tasks::{self, RestoreRequest, WarmRequest, report, resolve};
use crate::agent::tasks::{Task, TaskSpec};
use crate::agent::view::{self, TaskKind, TaskProgress};
use crate::error::{Error, Result};
use crate::limits::PATH_LEN_MAX;
use crate::ops::SaveOptions;
use crate::repository::log::StepFacts;
use crate::repository::{Name, Selector};
use crate::transfer::identity::Identity;

/// Interval of progress events.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Body of a save.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Save {
    path: PathBuf,
    name: String,
    repository: Option<String>,
    base: Option<String>,
    cut: Option<String>,
    compression: Option<String>,
    key_every: Option<NonZeroU32>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
    world_size: Option<NonZeroU32>,
    framework: Option<String>,
    #[serde(default)]
    exclude: Vec<String>,
    #[serde(default)]
    reread: bool,
}

/// Body of a restore.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Restore {
    name: String,
    path: Option<String>,
    to: PathBuf,
    repository: Option<String>,
    #[serde(default)]
    overwrite: bool,
    #[serde(default)]
    delete: bool,
    #[serde(default)]
    paths: Vec<String>,
}

/// Body of a fetch.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fetch {
    name: String,
    path: Option<String>,
    from: Option<String>,
    #[serde(default)]
    or_repository: bool,
    repository: Option<String>,
}

/// Body of a warm.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Warm {
    name: String,
    path: Option<String>,
    from: Option<String>,
    #[serde(default)]
    or_repository: bool,
    pin: Option<Span>,
    owner: Option<String>,
    repository: Option<String>,
    #[serde(default)]
    dry_run: bool,
}

/// A task that has begun.
type Begun = Result<(StatusCode, Json<view::Task>), ApiError>;

pub(super) async fn save(State(state): State<Arc<AgentState>>, JsonBody(asked): JsonBody<Save>) -> Begun {
    let name: Name = asked.name.parse()?;
    let repository = state.repository(asked.repository.as_deref())?.clone();
    let base: Option<Selector> = asked.base.as_deref().map(str::parse).transpose()?;
    let path = absolute(asked.path)?;
    let mut facts = StepFacts::default();
    for (name, value) in &asked.metrics {
        facts = facts.metric(name, *value)?;
    }
    if let Some(ranks) = asked.world_size {
        facts = facts.world_size(ranks);
    }
    if let Some(framework) = &asked.framework {
        facts = facts.framework(framework)?;
    }
    let mut options = SaveOptions {
        cut: asked.cut.as_deref().map(str::parse).transpose()?.unwrap_or_default(),
        labels: asked.labels,
        facts,
        exclude: asked.exclude,
        reread: asked.reread,
        compression: asked.compression.as_deref().map(str::parse).transpose()?.unwrap_or_default(),
        key_every: asked.key_every,
        ..SaveOptions::default()
    };
    let about = TaskSpec {
        kind: TaskKind::Save,
        name: name.to_string(),
        repository: Some(repository.store().location().to_string()),
        caller: None,
    };
    let begun = state.tasks.begin_stoppable(about, move |progress, stop| async move {
        (options.progress, options.stop) = (progress, stop);
        if let Some(base) = base {
            options.base = Some(repository.resolve(&base).await?);
        }
        report(&Box::pin(repository.save(&path, &name, &options)).await?)
    })?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

pub(super) async fn restore(State(state): State<Arc<AgentState>>, JsonBody(asked): JsonBody<Restore>) -> Begun {
    let restoring = RestoreRequest {
        name: asked.name.parse()?,
        below: below(asked.path)?,
        to: absolute(asked.to)?,
        overwrite: asked.overwrite,
        delete: asked.delete,
        only: asked.paths,
    };
    let begun = tasks::restore(&state, asked.repository.as_deref(), restoring)?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

/// Brings a file or folder of what a name stands for into the cache, ahead of whoever is about to read it.
pub(super) async fn fetch(State(state): State<Arc<AgentState>>, JsonBody(asked): JsonBody<Fetch>) -> Begun {
    let from = asked.from.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let (name, below) = (asked.name.parse()?, below(asked.path)?);
    let warming = WarmRequest {
        name,
        below,
        kind: TaskKind::Fetch,
        from,
        or_repository: asked.or_repository,
        pin: None,
        dry_run: false,
        caller: None,
    };
    let begun = tasks::warm(&state, asked.repository.as_deref(), warming)?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

/// Brings what a name stands for into the cache; what is there already is not brought again.
pub(super) async fn warm(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<Warm>,
) -> Begun {
    caller.may_name(asked.repository.as_deref())?;
    let pin = match asked.pin {
        Some(Span(span)) => {
            let (expires, limit) = state.caller_pins.bounds(caller.agent(), Some(span), |span| state.after(span))?;
            Some(Pinning { owner: caller.owner(asked.owner), expires, limit })
        }
        None => None,
    };
    let from = asked.from.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let agent = caller.agent().cloned();
    // A choice is made now, so that whoever asked is told at once which step it is.
    let repository = state.origin(asked.repository.as_deref())?;
    let name = resolve(state.exchange()?, repository, caller.agent(), &asked.name.parse()?).await?;
    let warming = WarmRequest {
        name: Selector::Name(name),
        below: below(asked.path)?,
        kind: TaskKind::Warm,
        from,
        or_repository: asked.or_repository,
        pin,
        dry_run: asked.dry_run,
        caller: agent,
    };
    let begun = tasks::warm(&state, asked.repository.as_deref(), warming)?;
    Ok((StatusCode::ACCEPTED, Json(begun.view_for(caller.agent()))))
}

pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Json<view::TaskList> {
    Json(state.tasks.list(caller.agent()))
}

pub(super) async fn one(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::Task>, ApiError> {
    Ok(Json(state.tasks.find(&id, caller.agent())?.view_for(caller.agent())))
}

/// Stops a task, and answers when it has ended.
pub(super) async fn stop(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::Task>, ApiError> {
    let found = state.tasks.find(&id, caller.agent())?;
    found.stop();
    found.ended().await;
    Ok(Json(found.view_for(caller.agent())))
}

/// Tells how far a task is, until it has ended: events `progress`, then one `end`.
pub(super) async fn events(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let task = state.tasks.find(&id, caller.agent())?;
    let following = Following { task, caller: caller.agent().cloned(), sent: None, over: false };
    let events = futures::stream::unfold(following, |mut following| async move {
        let event = following.next().await?;
        Some((Ok(event), following))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Stream of a task's events.
struct Following {
    task: Arc<Task>,
    /// Which other agent it is, if it is one.
    caller: Option<Identity>,
    sent: Option<TaskProgress>,
    over: bool,
}

impl Following {
    /// The next event; None after the end.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if self.over {
                return None;
            }
            // The first is told at once.
            if self.sent.is_some() && self.task.is_running() {
                tokio::select! {
                    () = tokio::time::sleep(TELL_EVERY) => {}
                    () = self.task.ended() => {}
                }
            }
            let view = self.task.view_for(self.caller.as_ref());
            self.over = view.state != view::TaskState::Running;
            let name = if self.over { "end" } else { "progress" };
            if self.over || self.sent.as_ref() != Some(&view.progress) {
                self.sent = Some(view.progress.clone());
                // A view is always JSON.
                return Event::default().event(name).json_data(&view).ok();
            }
        }
    }
}

/// A path within a tree; None for all of it.
///
/// # Errors
/// Usage, if no tree can have such a path.
fn below(path: Option<String>) -> Result<Option<String>> {
    let path = path.map(|path| path.trim_matches('/').to_owned()).filter(|path| !path.is_empty());
    if let Some(path) = &path
        && path.len() > PATH_LEN_MAX
    {
        return Err(Error::usage("path is too long").expected(format!("at most {PATH_LEN_MAX} bytes")).got(path.len()));
    }
    Ok(path)
}

/// The agent's working directory is nobody else's.
fn absolute(path: PathBuf) -> Result<PathBuf> {
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Error::usage("path is not absolute").at(path.display()).help("name it from / on"))
}
