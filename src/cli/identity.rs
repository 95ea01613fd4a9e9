//! `towline identity`: certificates by which agents know each other.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::args::{AuthorityFolder, IdentityVerb};
use super::output::printable;
use super::verbs::Context;
use crate::clock::{Clock as _, SystemClock};
use crate::error::{Error, Result};
use crate::transfer::identity::{Authority, Certificate, Subject, show};

/// Certificates that were made, or exist.
#[derive(Serialize)]
struct Certificates {
    #[serde(skip_serializing_if = "Option::is_none")]
    folder: Option<PathBuf>,
    certificates: Vec<Certificate>,
}

impl Context {
    pub(super) fn identity(&self, what: IdentityVerb) -> Result<()> {
        let now = SystemClock.now();
        match what {
            IdentityVerb::Init { authority, name, days } => {
                let folder = self.authority(&authority)?;
                let made = Authority::create(folder, &name, days, now)?;
                self.made(folder, made.certificate().clone())?;
                self.output.remark("whoever has ca.key can make agents: keep it away from the nodes");
                Ok(())
            }
            IdentityVerb::Issue { agent, to, dns, authority, days } => {
                let authority = Authority::open(self.authority(&authority)?)?;
                let subject = Subject { identity: &agent, dns_names: &dns };
                self.made(&to, authority.issue(&subject, &to, (days, now), false)?)
            }
            IdentityVerb::IssuePolicy { to, authority, days } => {
                let authority = Authority::open(self.authority(&authority)?)?;
                self.made(&to, authority.issue_policy_key(&to, days, now)?)?;
                self.output.remark("whoever has policy.key decides who may read what: keep it away from the nodes");
                Ok(())
            }
            IdentityVerb::Rotate { folder, authority, days } => {
                let old = show(&folder)?;
                let of_agent = |old: &Certificate| Some((old.identity.clone()?, old.dns_names.clone()));
                let (identity, dns_names) = old
                    .iter()
                    .find_map(of_agent)
                    .ok_or_else(|| Error::not_found("no certificate of an agent").at(folder.display()))?;
                let authority = Authority::open(self.authority(&authority)?)?;
                let subject = Subject { identity: &identity, dns_names: &dns_names };
                self.made(&folder, authority.issue(&subject, &folder, (days, now), true)?)
            }
            IdentityVerb::Show { path } => {
                let shown = Certificates { folder: None, certificates: show(&path)? };
                self.output.answer(&shown, |shown, _| shown.certificates.iter().map(described).collect())
            }
        }
    }

    /// The folder that was named, or the usual one.
    fn authority<'a>(&'a self, named: &'a AuthorityFolder) -> Result<&'a Path> {
        named.authority.as_deref().map_or_else(|| self.settings.authority(), Ok)
    }

    fn made(&self, folder: &Path, certificate: Certificate) -> Result<()> {
        let made = Certificates { folder: Some(folder.to_owned()), certificates: vec![certificate] };
        self.output.report(&made, |made, _| {
            let text: String = made.certificates.iter().map(described).collect();
            format!("wrote {}\n{text}", folder.display())
        })
    }
}

fn described(certificate: &Certificate) -> String {
    let title = match &certificate.identity {
        Some(identity) => identity.to_string(),
        None if certificate.policy => "policy key (signs policy, and is no agent)".to_owned(),
        None if certificate.authority => format!("authority {}", certificate.subject),
        None => format!("{} (names no agent)", certificate.subject),
    };
    let Certificate { issuer, serial, fingerprint, not_before, not_after, .. } = certificate;
    let title = printable(&title);
    let issuer = printable(issuer);
    format!(
        "{title}\n  holds: {not_before} to {not_after}\n  signed by: {issuer}\n  serial: {serial}\n  SHA-256: {fingerprint}\n"
    )
}
