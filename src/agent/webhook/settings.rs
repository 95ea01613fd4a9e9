//! Settings of a sidecar, as the text of its file.

use std::fmt::Write as _;

use super::config::SidecarTemplate;
use super::inject::{AUTHORITIES_FILE, TOKEN_FILE};
use crate::agent::pods::PodAnnotations;

/// The settings of the sidecar of a pod that asks for `wanted`. `grace` is in seconds.
pub(super) fn settings(template: &SidecarTemplate, wanted: &PodAnnotations, grace: u64) -> String {
    let mut text = String::from("# Written by Towline's webhook.\n");
    // Writing to a string cannot fail.
    let _ = write(&mut text, template, wanted, grace);
    text
}

fn write(
    text: &mut String,
    template: &SidecarTemplate,
    wanted: &PodAnnotations,
    grace: u64,
) -> Result<(), std::fmt::Error> {
    writeln!(text, "repository = {}", quoted(&template.repository))?;
    if let Some(endpoint) = &template.endpoint {
        writeln!(text, "endpoint = {}", quoted(endpoint))?;
    }
    if template.allow_http {
        writeln!(text, "allow_http = true")?;
    }
    writeln!(text, "socket = \"/run/towline/agent/agent.sock\"")?;
    writeln!(text, "memory = {}", template.memory)?;
    writeln!(text, "grace = \"{grace}s\"")?;
    if let Some(identity) = &template.identity {
        writeln!(text, "identity = \"/var/lib/towline/identity\"")?;
        writeln!(text, "\n[service_account]")?;
        writeln!(text, "url = {}", quoted(&identity.url))?;
        writeln!(text, "token = {}\nauthorities = {}", quoted(TOKEN_FILE), quoted(AUTHORITIES_FILE))?;
    }
    writeln!(text, "\n[cache]\ndir = \"/var/lib/towline/cache\"")?;
    writeln!(text, "capacity = {}", wanted.cache.unwrap_or(template.cache))?;
    // A pod comes and goes, and so would what it publishes.
    writeln!(text, "inventory = \"0s\"")?;
    if !template.peers.is_empty() {
        writeln!(text, "\n[peers]\ndns = {}", list(&template.peers))?;
    }
    if let Some(memory) = wanted.stage_memory {
        writeln!(text, "\n[staging]\nmemory = {memory}")?;
    }
    writeln!(text, "\n[sidecar]")?;
    for (key, names) in [("warm", &wanted.warm), ("stage", &wanted.stage)] {
        if !names.is_empty() {
            writeln!(text, "{key} = {}", list(names))?;
        }
    }
    let restored = wanted.restore.iter();
    let restored = restored.map(|(name, to)| format!("{{ name = {}, to = {} }}", quoted(name), quoted(to)));
    if !wanted.restore.is_empty() {
        writeln!(text, "restore = [{}]", restored.collect::<Vec<_>>().join(", "))?;
    }
    for (folder, run) in &wanted.watch {
        writeln!(text, "\n[[sidecar.watch]]\nfolder = {}\nrun = {}", quoted(folder), quoted(run))?;
    }
    Ok(())
}

fn list<T: ToString>(values: &[T]) -> String {
    format!("[{}]", values.iter().map(quoted).collect::<Vec<_>>().join(", "))
}

/// A string in TOML. Its escapes are those of JSON, for text without control characters.
fn quoted(value: &(impl ToString + ?Sized)) -> String {
    serde_json::Value::String(value.to_string()).to_string()
}
