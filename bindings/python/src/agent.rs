//! Requests to this node's agent.

use pyo3::prelude::*;
use serde_json::Value;
use towline::Error;
use towline::agent::Client;

use crate::errors::raised;
use crate::runtime::wait;

/// Sends `method` (`GET` or `POST`) for `path` to this node's agent, or through it to an agent of the site `at`; the body and the
/// answer are JSON. Returns the answer, and the agent that gave it, if `at` was given.
///
/// # Errors
/// Not found or unreachable, if there is no agent; else the error that it returns.
#[pyfunction]
#[pyo3(signature = (method, path, body=None, at=None))]
pub(crate) fn agent_request(
    py: Python<'_>,
    method: &str,
    path: String,
    body: Option<&str>,
    at: Option<&str>,
) -> PyResult<(String, Option<String>)> {
    let malformed = |source| raised(py, &Error::usage("request is not JSON").source(source));
    let body: Value = serde_json::from_str(body.unwrap_or("{}")).map_err(malformed)?;
    let at = at.map(str::parse).transpose().map_err(|error: Error| raised(py, &error))?;
    let is_get = method == "GET";
    wait(py, async move {
        let agent = Client::required()?.routed_to(at);
        if is_get {
            let answer: Value = agent.get(&path).await?;
            return Ok((answer.to_string(), agent.selector().map(ToString::to_string)));
        }
        let (answer, agent): (Value, Client) = agent.begin(&path, &body).await?;
        Ok((answer.to_string(), agent.selector().map(ToString::to_string)))
    })
}
