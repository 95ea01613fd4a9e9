//! `towline audit`: the log as it is, and whether it is as it was written.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::args::{AuditFolder, AuditShow, AuditVerb, AuditVerify};
use super::output::printable;
use super::verbs::Context;
use crate::audit::{
    Decision, Entry, EntryKind, Fault, Findings, Head, SignedHead, Verdict, published, read_segments, verify,
};
use crate::clock::{Clock as _, SystemClock, Timestamp};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::size;
use crate::transfer::identity::{Context as Signed, Signature, Trusted};
use crate::work::blocking;

/// Findings, as they are printed.
#[derive(Serialize)]
struct Verified {
    sound: bool,
    #[serde(flatten)]
    findings: Findings,
    /// Published heads that were compared.
    heads: usize,
    /// The entries that are not covered by a published head.
    #[serde(skip_serializing_if = "Option::is_none")]
    local_only: Option<(u64, u64)>,
}

impl Context {
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn audit(&self, what: AuditVerb) -> Result<u8> {
        match what {
            AuditVerb::Show(show) => self.show_audit(&show)?,
            AuditVerb::Export { log, since } => {
                self.lines(&self.audit_folder(&log)?, since, |_, line| Some([line, b"\n"].concat()))?;
            }
            AuditVerb::Verify(verify) => return self.verify_audit(&verify).await,
        }
        Ok(0)
    }

    fn audit_folder(&self, named: &AuditFolder) -> Result<PathBuf> {
        named.dir.clone().or_else(|| self.settings.audit.clone()).ok_or_else(|| {
            Error::usage("no audit log is named").help("give --dir DIR: the folder that [audit] dir of the agent names")
        })
    }

    fn show_audit(&self, show: &AuditShow) -> Result<()> {
        let folder = self.audit_folder(&show.log)?;
        self.lines(&folder, show.since, |entry, line| {
            if !is_wanted(show, entry) {
                return None;
            }
            Some(if self.output.is_json() { [line, b"\n"].concat() } else { described(entry).into_bytes() })
        })
    }

    /// Prints of each entry since then what `render` makes of it, a segment at a time.
    fn lines(
        &self,
        folder: &Path,
        since: Option<Duration>,
        render: impl Fn(&Entry, &[u8]) -> Option<Vec<u8>>,
    ) -> Result<()> {
        let now = SystemClock.now();
        let from =
            since.map(|span| Timestamp(now.0.saturating_sub(i64::try_from(span.as_nanos()).unwrap_or(i64::MAX))));
        for segment in read_segments(folder)? {
            let segment = segment?;
            let mut out = Vec::new();
            for (number, line) in (1..).zip(segment.bytes.split(|byte| *byte == b'\n')) {
                if line.is_empty() {
                    continue;
                }
                let entry: Entry = match serde_json::from_slice(line) {
                    Ok(entry) => entry,
                    Err(_) => {
                        self.output
                            .remark(&format!("{}, line {number} is no entry: `towline audit verify`", segment.name));
                        continue;
                    }
                };
                if from.is_none_or(|from| entry.time >= from) {
                    out.extend(render(&entry, line).unwrap_or_default());
                }
            }
            self.output.print(&out)?;
        }
        Ok(())
    }

    async fn verify_audit(&self, asked: &AuditVerify) -> Result<u8> {
        let folder = self.audit_folder(&asked.log)?;
        let origin = blocking({
            let folder = folder.clone();
            move || origin(&folder)
        });
        let origin = origin.await?;
        let expected = match (&asked.agent, &asked.user) {
            (_, Some(user)) => Some(format!("cli:{user}")),
            (Some(agent), None) => Some(agent.to_string()),
            (None, None) => origin.clone(),
        };
        let identity = asked.agent.clone().or_else(|| origin.as_ref().and_then(|origin| origin.parse().ok()));
        let mut faults = Vec::new();
        if let (Some(expected), Some(origin)) = (&expected, &origin)
            && expected != origin
        {
            faults.push(of_log(format!("log says that it is of {origin}, not of {expected}")));
        }
        let heads = match &identity {
            Some(identity) if !asked.offline => self.heads(asked, identity, &mut faults).await?,
            _ => Vec::new(),
        };
        // An agent signs its own, and those of commands on its node.
        let heads: Vec<Head> = heads.into_iter().filter(|head| Some(&head.origin) == expected.as_ref()).collect();
        let (first, compared) = (asked.first, heads.len());
        let findings = blocking(move || verify(read_segments(&folder)?, &heads, first));
        let mut findings = findings.await?;
        findings.faults.extend(faults);
        let local_only = findings.local_only();
        let verified = Verified { sound: findings.faults.is_empty(), findings, heads: compared, local_only };
        self.output.answer(&verified, |verified, _| summary(verified))?;
        Ok(if verified.sound { 0 } else { 4 })
    }

    /// The heads that were published for `identity` and are signed as they should be; the others are faults.
    async fn heads(&self, asked: &AuditVerify, identity: &Identity, faults: &mut Vec<Fault>) -> Result<Vec<Head>> {
        let Some(repository) = self.open_if_made().await? else {
            self.output.remark("there is no repository, so no published head was looked at");
            return Ok(Vec::new());
        };
        let path = match &asked.trusted {
            Some(path) => path.clone(),
            None => self.settings.authority()?.to_owned(),
        };
        let trusted = blocking(move || Trusted::read(&path, SystemClock.now())).await.map_err(|error| {
            error.help("name the authority that has certified the agent with --trusted, or give --offline")
        })?;
        let (mut heads, sound) = (Vec::new(), faults.len());
        let each = |found: Result<SignedHead>| {
            let head = found.and_then(|found| {
                let signature = Signature::decode(&found.signature)?;
                let head = found.head;
                let signer = trusted.verify(&signature, Signed::AuditHead, &head.encode(), head.time)?;
                if signer.agent()? != identity {
                    let error = Error::denied("head was signed by another agent").expected(identity);
                    return Err(error.got(signer.agent()?));
                }
                Ok(head)
            });
            match head {
                Ok(head) => heads.push(head),
                Err(error) => faults.push(of_log(format!("a published head is not to be trusted: {error}"))),
            }
        };
        published(&repository, identity, asked.heads, each).await?;
        if faults.len() > sound {
            self.output.remark(
                "heads that were signed before a change of authorities need the old certificate, too: --trusted with a file of both",
            );
        }
        if heads.is_empty() && faults.is_empty() {
            let place = repository.store().location();
            self.output.remark(&format!(
                "{place} has no published head of {identity}: name the agent's first repository with --repo"
            ));
        }
        Ok(heads)
    }
}

/// Whose log it says to be.
fn origin(folder: &Path) -> Result<Option<String>> {
    let Some(segment) = read_segments(folder)?.next() else { return Ok(None) };
    let segment = segment?;
    let first = segment.bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(match serde_json::from_slice::<Entry>(first) {
        Ok(Entry { what: EntryKind::Begin { origin, .. }, .. }) => Some(origin),
        _ => None,
    })
}

fn of_log(what: String) -> Fault {
    Fault { segment: None, line: None, entry: None, what }
}

fn is_wanted(show: &AuditShow, entry: &Entry) -> bool {
    let decision = match &entry.what {
        EntryKind::Decision(decision) => Some(decision),
        _ => None,
    };
    let refused = decision.is_some_and(|decision| decision.verdict == Verdict::Deny);
    let name = decision.and_then(|decision| decision.name.as_deref());
    let named = show.name.as_ref().is_none_or(|wanted| name.is_some_and(|name| wanted.takes(name.as_bytes())));
    named && (refused || !show.denied)
}

fn described(entry: &Entry) -> String {
    let text = match &entry.what {
        EntryKind::Begin { log, origin, .. } => format!("segment of log {log} of {}", printable(origin)),
        EntryKind::Decision(decision) => decided(decision),
        EntryKind::End { of, bytes, requests, outcome } => {
            let repeats = if *requests == 1 { String::new() } else { format!(", {requests} requests") };
            format!("end of {of}: {}{repeats}, {}", size::show(*bytes), printable(outcome))
        }
        EntryKind::Torn { bytes, .. } => format!("{bytes} bytes were no entries, and are in a file beside the log"),
    };
    format!("{}  {:>6}  {text}\n", entry.time, entry.seq)
}

fn decided(decision: &Decision) -> String {
    let verdict = match decision.verdict {
        Verdict::Allow => "allow",
        Verdict::Deny => "deny",
    };
    let name = decision.name.as_deref().unwrap_or("(no name)");
    let to = decision.to.as_ref().map_or_else(String::new, |to| format!(" to {}", printable(to)));
    let asked = decision.asked.as_ref().map_or_else(String::new, |asked| format!(", asked of {}", printable(asked)));
    let (actor, rule) = (decision.actor.to_string(), &decision.rule);
    let action = decision.action.word();
    format!("{verdict:<5}  {action}  {}{to}{asked}  {}  ({})", printable(name), printable(&actor), printable(rule))
}

fn summary(verified: &Verified) -> String {
    let Findings { log, origin, first, last, published, published_at, faults } = &verified.findings;
    let mut text = String::new();
    // Text takes all that is written to it.
    if let (Some(log), Some(origin)) = (log, origin) {
        let _ = writeln!(text, "audit log {log} of {}", printable(origin));
    }
    if last >= first {
        let _ = writeln!(text, "  entries {first} to {last} follow from each other");
    }
    match (published, published_at) {
        (Some(published), Some(at)) => {
            let _ = writeln!(text, "  published: entry {published}, at {at}");
        }
        _ => {
            let _ = writeln!(text, "  no published head was compared");
        }
    }
    if let (Some((from, to)), Some(_)) = (verified.local_only, published) {
        let _ = writeln!(text, "  not published yet: entries {from} to {to}");
    }
    for fault in faults {
        let place = match (&fault.segment, fault.line) {
            (Some(segment), Some(line)) => format!(" ({segment}, line {line})"),
            _ => String::new(),
        };
        let _ = writeln!(text, "FAULT: {}{place}", printable(&fault.what));
    }
    text
}
