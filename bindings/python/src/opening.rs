//! Options with which Python opens a repository.

use std::path::PathBuf;

use pyo3::prelude::*;
use rustix::process::getuid;
use towline::Result;
use towline::agent::{Client, user_name};
use towline::policy::LocalCaller;
use towline::repository::{OpenOptions, Repository as Engine};
use towline::storage::{Location, StoreOptions, open};
use towline::transfer::policy::machine_guard;

/// Options of `open`: a dict with `create` and optionally the other keys.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Opening {
    #[pyo3(default)]
    pub(crate) memory: Option<u64>,
    #[pyo3(default)]
    pub(crate) cache: Option<PathBuf>,
    #[pyo3(default)]
    pub(crate) endpoint: Option<String>,
    #[pyo3(default)]
    pub(crate) region: Option<String>,
    #[pyo3(default)]
    pub(crate) allow_http: bool,
    /// True: creates a missing repository; false: does not. None: creates it, unless this user had one in this folder.
    pub(crate) create: Option<bool>,
}

impl Opening {
    /// Opens the engine for requests of this process's user; the second value is true if it created the repository.
    pub(crate) async fn open(self, location: Location) -> Result<(Engine, bool)> {
        let Self { memory, cache, endpoint, region, allow_http, create } = self;
        let store = StoreOptions { endpoint, region, allow_http, ..StoreOptions::default() };
        let options = OpenOptions { memory, cache, guard: Some(machine_guard()?) };
        let (engine, created) = match create {
            None => Engine::at_or_create(&location, &store, options).await?,
            Some(true) => {
                let store = StoreOptions { create: true, ..store };
                Engine::create(open(&location, &store).await?, options).await?
            }
            Some(false) => (Engine::at(&location, &store, options).await?, false),
        };
        // Rules of a policy about callers see the user, as for a command.
        let engine = engine.for_caller(Some(LocalCaller::user(&user_name(getuid()))));
        // Reads chunks from this node's agent, if there is one.
        Ok((Client::attached(engine).await, created))
    }
}
