//! Tasks: start, list, follow, stop.

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
use utoipa::ToSchema;

use super::auth::check_scope;
use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use super::recorded::AccessRequest;
use super::rights::Need;
use super::save_scopes::{allowed_path, check_labels, name_scopes};
use crate::agent::Pinning;
use crate::agent::audit::{follow, follow_with};
use crate::agent::config::Span;
use crate::agent::requester::Requester;
use crate::agent::state::AgentState;
use crate::agent::tasks::{self, RestoreRequest, Task, TaskReport, TaskSpec, WarmRequest, resolve, resolve_for};
use crate::agent::usage::count_saved;
use crate::agent::view::{self, TaskKind, TaskProgress};
use crate::audit::Action;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::PATH_LEN_MAX;
use crate::name::Name;
use crate::ops::{RootLink, SaveOptions};
use crate::policy::Scope;
use crate::repository::Repository;
use crate::repository::log::StepFacts;
use crate::selector::Selector;
use crate::transfer::exchange::FetchPolicy;

/// Interval of progress events.
const EVENT_INTERVAL: Duration = Duration::from_millis(200);

/// Body of a save.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Save {
    /// Absolute path on the agent's machine.
    #[schema(value_type = String)]
    path: PathBuf,
    /// Name to save it under.
    name: String,
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// Name of a similar tree, whose chunks serve as bases.
    base: Option<String>,
    /// `auto`, `tensor`, `content` or `fixed`.
    cut: Option<String>,
    /// `auto`, `if-faster`, `predict` or `off`.
    compression: Option<String>,
    /// Number of saves after which tensors are stored whole again.
    #[schema(value_type = Option<u32>, minimum = 1)]
    key_every: Option<NonZeroU32>,
    /// Labels of the step.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// Metrics of the step.
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
    /// World size of the training.
    #[schema(value_type = Option<u32>, minimum = 1)]
    world_size: Option<NonZeroU32>,
    /// Framework that wrote it.
    framework: Option<String>,
    /// Patterns of files to leave out.
    #[serde(default)]
    exclude: Vec<String>,
    /// Read files again that seem unchanged.
    #[serde(default)]
    reread: bool,
}

/// Body of a restore.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Restore {
    /// A name, or RUN@CHOICE.
    name: String,
    /// Only this file or folder of it.
    path: Option<String>,
    /// Absolute path on the agent's machine.
    #[schema(value_type = String)]
    to: PathBuf,
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// Replace files that differ.
    #[serde(default)]
    overwrite: bool,
    /// Delete files in `to` that the tree does not have.
    #[serde(default)]
    delete: bool,
    /// Only files and folders that match one of these paths or patterns.
    #[serde(default)]
    paths: Vec<String>,
}

/// Body of a fetch.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Fetch {
    /// A name, or RUN@CHOICE.
    name: String,
    /// Only this file or folder of it.
    path: Option<String>,
    /// Only source: SITE, SITE/AGENT or `repository`; by default the nearest one that has the chunk.
    from: Option<String>,
    /// Read chunks that `from` lacks from the repository.
    #[serde(default)]
    or_repository: bool,
    /// Repository; the default one if absent.
    repository: Option<String>,
}

/// Body of a warm.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Warm {
    /// A name, or RUN@CHOICE.
    name: String,
    /// Only this file or folder of it.
    path: Option<String>,
    /// Only source: SITE, SITE/AGENT or `repository`; by default the nearest one that has the chunk.
    from: Option<String>,
    /// Read chunks that `from` lacks from the repository.
    #[serde(default)]
    or_repository: bool,
    /// Duration of the pin.
    pin: Option<Span>,
    /// Owner of the pin, which replaces an earlier pin of the same owner for the same name, and ends no earlier than that.
    owner: Option<String>,
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// Only report what is missing: fetch and pin nothing.
    #[serde(default)]
    dry_run: bool,
}

/// Response for a started task.
type TaskStarted = Result<(StatusCode, Json<view::Task>), ApiError>;

/// Starts to save a file or folder under a name.
#[utoipa::path(
    post,
    path = "/v1/save",
    operation_id = "save",
    request_body = Save,
    responses((status = 202, description = "The task has started", body = view::Task)),
)]
pub(super) async fn save(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Save>,
) -> TaskStarted {
    let name: Name = body.name.parse()?;
    caller.check_repository_name(body.repository.as_deref())?;
    let repository = state.repository(body.repository.as_deref())?.for_caller(caller.local());
    let base: Option<Selector> = body.base.as_deref().map(str::parse).transpose()?;
    let recorded = AccessRequest::separate(&caller, Action::Save, Some(&repository));
    let path = match allowed_path(&caller, &name, absolute(body.path)?).await {
        Ok(path) => path,
        Err(error) => return Err(recorded.refuse(&state, &name, error).await.into()),
    };
    let root_link = if caller.grant().is_some() { RootLink::Refuse } else { RootLink::Follow };
    let mut facts = StepFacts::default();
    for (name, value) in &body.metrics {
        facts = facts.metric(name, *value)?;
    }
    if let Some(ranks) = body.world_size {
        facts = facts.world_size(ranks);
    }
    if let Some(framework) = &body.framework {
        facts = facts.framework(framework)?;
    }
    if let Some(grant) = caller.grant() {
        check_labels(grant, &body.labels)?;
    }
    let (label_scope, readable) = name_scopes(caller.grant());
    let mut options = SaveOptions {
        cut: body.cut.as_deref().map(str::parse).transpose()?.unwrap_or_default(),
        labels: body.labels,
        facts,
        exclude: body.exclude,
        reread: body.reread,
        compression: body.compression.as_deref().map(str::parse).transpose()?.unwrap_or_default(),
        key_every: body.key_every,
        root_link,
        label_scope,
        readable,
        caller: caller.requester().map(|requester| requester.limited_owners().into()),
        ..SaveOptions::default()
    };
    let about = TaskSpec {
        kind: TaskKind::Save,
        name: name.to_string(),
        repository: Some(repository.store().location().to_string()),
        caller: caller.requester(),
    };
    let grant = caller.grant().cloned();
    let request = recorded.allow(&state, &name).await?;
    let ledger = state.ledger();
    let work = move |progress, stop| async move {
        (options.progress, options.stop) = (progress, stop);
        if let Some(base) = base {
            options.base = Some(resolve_for(&repository, grant.as_ref(), &base).await?);
        }
        let saved = Box::pin(repository.save(&path, &name, &options)).await?;
        if let Some(ledger) = ledger {
            count_saved(&ledger, &repository, &saved);
        }
        Ok(TaskReport::Save(Box::new(saved)))
    };
    let begun = follow(request, caller.begin(|| state.tasks.begin_stoppable(about, work)))?;
    Ok((StatusCode::ACCEPTED, Json(begun.view_for(caller.requester().as_ref()))))
}

/// Starts to restore a saved tree.
#[utoipa::path(
    post,
    path = "/v1/restore",
    operation_id = "restore",
    request_body = Restore,
    responses((status = 202, description = "The task has started", body = view::Task)),
)]
pub(super) async fn restore(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Restore>,
) -> TaskStarted {
    let restoring = RestoreRequest {
        name: body.name.parse()?,
        below: below(body.path)?,
        to: absolute(body.to)?,
        overwrite: body.overwrite,
        delete: body.delete,
        only: body.paths,
        by: caller.local(),
    };
    let repository = state.repository(body.repository.as_deref())?;
    let request =
        AccessRequest::separate(&caller, Action::Restore, Some(repository)).allow(&state, &restoring.name).await?;
    let begun = follow(request, caller.begin(|| tasks::restore(&state, body.repository.as_deref(), restoring)))?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

/// Starts to fetch a file or folder of a saved tree into the cache, ahead of a reader.
#[utoipa::path(
    post,
    path = "/v1/fetch",
    operation_id = "fetch",
    request_body = Fetch,
    responses((status = 202, description = "The task has started", body = view::Task)),
)]
pub(super) async fn fetch(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Fetch>,
) -> TaskStarted {
    caller.check_repository_name(body.repository.as_deref())?;
    let from = body.from.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let (mut name, below) = (body.name.parse()?, below(body.path)?);
    let requester = caller.requester();
    let repository = state.origin(body.repository.as_deref())?;
    let recorded = AccessRequest::separate(&caller, Action::Warm, Some(repository));
    if let Some(grant) = caller.grant() {
        name = match resolve_for(repository, Some(grant), &name).await {
            Ok(name) => Selector::Name(name),
            Err(error) => return Err(recorded.refuse(&state, &name, error).await.into()),
        };
    }
    let warming = WarmRequest {
        name,
        below,
        kind: TaskKind::Fetch,
        from,
        or_repository: body.or_repository,
        pin: None,
        dry_run: false,
        caller: requester.clone(),
        by: caller.local(),
    };
    let request = recorded.allow(&state, &warming.name).await?;
    let begun = follow(request, caller.begin(|| tasks::warm(&state, body.repository.as_deref(), warming)))?;
    Ok((StatusCode::ACCEPTED, Json(begun.view_for(requester.as_ref()))))
}

/// Starts to fetch a saved tree into the cache; cached chunks are not fetched again.
#[utoipa::path(
    post,
    path = "/v1/warm",
    operation_id = "warm",
    request_body = Warm,
    responses((status = 202, description = "The task has started", body = view::Task)),
)]
pub(super) async fn warm(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Warm>,
) -> TaskStarted {
    caller.check_repository_name(body.repository.as_deref())?;
    let requester = caller.requester();
    let repository = state.origin(body.repository.as_deref())?;
    let (selector, recorded): (Selector, _) =
        (body.name.parse()?, AccessRequest::separate(&caller, Action::Warm, Some(repository)));
    let pin = match body.pin {
        Some(Span(span)) => {
            if let Some(grant) = caller.grant() {
                check_scope(grant, Need::Scope(Scope::Pins))?;
            }
            match state.pin_bounds(requester.as_ref(), Some(span)) {
                Ok((expires, _)) => Some(Pinning { owner: caller.owner(body.owner), expires, by: requester.clone() }),
                Err(error) => return Err(recorded.refuse(&state, &selector, error).await.into()),
            }
        }
        None => None,
    };
    let policy = FetchPolicy {
        from: body.from.as_deref().map(str::parse).transpose()?.unwrap_or_default(),
        or_repository: body.or_repository,
        ..FetchPolicy::default()
    };
    let below = below(body.path)?;
    // Resolves the selector before the response, so that the response names the step. Errors of this node's callers are
    // reported here as well; for other agents and tokens the task checks them, since forbidden and absent names must look alike.
    let exchange = state.exchange()?;
    let name = match resolve(exchange, repository, requester.as_ref(), &selector).await {
        Ok(name) => name,
        Err(error) => return Err(recorded.refuse(&state, &selector, error).await.into()),
    };
    if requester.is_none() {
        repository.check_name(&name).await?;
        // A source that does not answer is not an error: the cache may have all chunks.
        if let Err(error) = exchange.check_reachable(&policy).await
            && error.kind() == ErrorKind::NotFound
        {
            return Err(error.into());
        }
    }
    if let Err(error) = check_policy(repository, &caller, &name).await {
        return Err(recorded.refuse(&state, &name, error).await.into());
    }
    let warming = WarmRequest {
        name: Selector::Name(name),
        below,
        kind: TaskKind::Warm,
        from: policy.from,
        or_repository: policy.or_repository,
        pin,
        dry_run: body.dry_run,
        caller: requester.clone(),
        by: caller.local(),
    };
    let request = recorded.allow(&state, &warming.name).await?;
    let pinning = match &warming.pin {
        Some(_) if !warming.dry_run => {
            AccessRequest::separate(&caller, Action::Pin, Some(repository)).allow(&state, &warming.name).await?
        }
        _ => None,
    };
    let begun = caller.begin(|| tasks::warm(&state, body.repository.as_deref(), warming));
    let begun = follow_with(request, Vec::from_iter(pinning), begun)?;
    Ok((StatusCode::ACCEPTED, Json(begun.view_for(requester.as_ref()))))
}

/// Checks before a task begins that the policy lets the tree of `name` come here, so that who does not wait for the task learns it. A name
/// that was removed meanwhile is the task's error.
///
/// # Errors
/// Denied, with the rule.
async fn check_policy(repository: &Repository, caller: &Caller, name: &Name) -> Result<()> {
    let repository = repository.for_caller(caller.local());
    let log = repository.state().await?;
    let Some(value) = log.refs.get(name) else { return Ok(()) };
    repository.check_readable(name, &value.manifest).await
}

/// Lists running tasks, and the last ones that ended.
#[utoipa::path(
    get,
    path = "/v1/tasks",
    operation_id = "listTasks",
    responses((status = 200, description = "The oldest first", body = view::TaskList)),
)]
pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Json<view::TaskList> {
    Json(state.tasks.list(caller.requester().as_ref()))
}

/// Shows a task.
#[utoipa::path(
    get,
    path = "/v1/tasks/{id}",
    operation_id = "showTask",
    params(("id" = String, Path, description = "Id of the task")),
    responses((status = 200, description = "As it is now", body = view::Task)),
)]
pub(super) async fn one(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::Task>, ApiError> {
    let requester = caller.requester();
    Ok(Json(state.tasks.find(&id, requester.as_ref())?.view_for(requester.as_ref())))
}

/// Stops a task and responds when it has ended; completed work stays.
#[utoipa::path(
    delete,
    path = "/v1/tasks/{id}",
    operation_id = "stopTask",
    params(("id" = String, Path, description = "Id of the task")),
    responses((status = 200, description = "It has ended", body = view::Task)),
)]
pub(super) async fn stop(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::Task>, ApiError> {
    let requester = caller.requester();
    let found = state.tasks.find(&id, requester.as_ref())?;
    found.stop();
    found.ended().await;
    Ok(Json(found.view_for(requester.as_ref())))
}

/// Follows a task: events `progress`, then one `end`, each with a Task as its data.
#[utoipa::path(
    get,
    path = "/v1/tasks/{id}/events",
    operation_id = "followTask",
    params(("id" = String, Path, description = "Id of the task")),
    responses((status = 200, description = "The events", body = String, content_type = "text/event-stream")),
)]
pub(super) async fn events(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let caller = caller.requester();
    let task = state.tasks.find(&id, caller.as_ref())?;
    let following = Following { task, caller, sent: None, over: false };
    let events = futures::stream::unfold(following, |mut following| async move {
        let event = following.next().await?;
        Some((Ok(event), following))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Stream of a task's events.
struct Following {
    task: Arc<Task>,
    /// Other agent or token that follows, if it is one.
    caller: Option<Requester>,
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
            // The first event is sent immediately.
            if self.sent.is_some() && self.task.is_running() {
                tokio::select! {
                    () = tokio::time::sleep(EVENT_INTERVAL) => {}
                    _ = self.task.ended() => {}
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

/// Path within a tree; None for the whole tree.
///
/// # Errors
/// Usage, if the path is not valid in any tree.
pub(super) fn below(path: Option<String>) -> Result<Option<String>> {
    let path = path.map(|path| path.trim_matches('/').to_owned()).filter(|path| !path.is_empty());
    if let Some(path) = &path
        && path.len() > PATH_LEN_MAX
    {
        return Err(Error::usage("path is too long").expected(format!("at most {PATH_LEN_MAX} bytes")).got(path.len()));
    }
    Ok(path)
}

/// Checks that the path is absolute: callers have other working directories than the agent.
fn absolute(path: PathBuf) -> Result<PathBuf> {
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Error::usage("path is not absolute").at(path.display()).help("give the path from the root (/)"))
}
