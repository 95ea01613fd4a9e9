//! Name of an agent.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::limits::AGENT_NAME_LEN_MAX;

/// The scheme of the URI in a certificate.
const SCHEME: &str = "towline://";
/// The scheme of SPIFFE ids.
const SPIFFE: &str = "spiffe://";
/// Bytes of a SPIFFE id, at most (<https://github.com/spiffe/spiffe/blob/main/standards/SPIFFE-ID.md>, 2.3).
const SPIFFE_LEN_MAX: usize = 2048;
/// Bytes of its trust domain, at most.
const TRUST_DOMAIN_LEN_MAX: usize = 255;

/// An agent and the site where it is; in a certificate, and printed, `towline://SITE/AGENT`.
///
/// Or a workload with a SPIFFE id: its site is then `spiffe://TRUST-DOMAIN`, which no site of a policy is called, and its name the path
/// of the id. Only a signed policy says which `SITE/AGENT` it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    site: String,
    agent: String,
}

impl Identity {
    /// The agent `agent` at `site`.
    ///
    /// # Errors
    /// Usage, if one of them is no name.
    pub fn new(site: &str, agent: &str) -> Result<Self> {
        for (what, name) in [("site", site), ("agent", agent)] {
            if !is_name(name) {
                return Err(Error::usage(format!("name of the {what} is malformed"))
                    .expected(format!(
                        "1 to {AGENT_NAME_LEN_MAX} lower-case letters, digits and . _ -, a letter or digit first"
                    ))
                    .got(format!("{:?}", name.chars().take(AGENT_NAME_LEN_MAX + 1).collect::<String>())));
            }
        }
        Ok(Self { site: site.to_owned(), agent: agent.to_owned() })
    }

    /// The workload with the SPIFFE id `text`, as <https://github.com/spiffe/spiffe/blob/main/standards/SPIFFE-ID.md> defines them,
    /// section 2. A path is needed: ids without one are those of authorities.
    ///
    /// # Errors
    /// Usage, if it is no id of a workload.
    pub fn spiffe(text: &str) -> Result<Self> {
        let malformed = |expected: &'static str| {
            Error::usage("SPIFFE id is malformed").expected(expected).got(format!("{text:.200?}"))
        };
        let rest = text.strip_prefix(SPIFFE).filter(|_| text.len() <= SPIFFE_LEN_MAX);
        let rest = rest.ok_or_else(|| malformed("spiffe://TRUST-DOMAIN/PATH of at most 2048 bytes"))?;
        let (domain, path) = rest.split_once('/').ok_or_else(|| malformed("a path after the trust domain"))?;
        let in_domain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
        if !(1..=TRUST_DOMAIN_LEN_MAX).contains(&domain.len()) || !domain.bytes().all(in_domain) {
            return Err(malformed("a trust domain of lower-case letters, digits and . - _"));
        }
        let in_segment = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let is_segment = |part: &str| !part.is_empty() && part != "." && part != ".." && part.bytes().all(in_segment);
        if !path.split('/').all(is_segment) {
            return Err(malformed("segments of letters, digits and . - _, none of them empty, . or .."));
        }
        Ok(Self { site: format!("{SPIFFE}{domain}"), agent: path.to_owned() })
    }

    /// True for a SPIFFE id: it is no `SITE/AGENT`, whatever pattern it is compared with.
    #[must_use]
    pub fn is_spiffe(&self) -> bool {
        self.site.starts_with(SPIFFE)
    }

    /// Site.
    #[must_use]
    pub fn site(&self) -> &str {
        &self.site
    }

    /// `SITE/AGENT`, as people and patterns write it; of a workload its SPIFFE id.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}/{}", self.site, self.agent)
    }

    /// Name within the site.
    #[must_use]
    pub fn agent(&self) -> &str {
        &self.agent
    }
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=AGENT_NAME_LEN_MAX).contains(&name.len())
        && name.bytes().all(|byte| plain(byte) || b"._-".contains(&byte))
        && name.bytes().next().is_some_and(plain)
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_spiffe() { "" } else { SCHEME };
        write!(f, "{scheme}{}/{}", self.site, self.agent)
    }
}

impl FromStr for Identity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.starts_with(SPIFFE) {
            return Self::spiffe(text);
        }
        let names = text.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/'));
        let (site, agent) = names.ok_or_else(|| {
            Error::usage("identity is malformed").expected("towline://SITE/AGENT").got(format!("{text:.200?}"))
        })?;
        Self::new(site, agent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_survive_text_and_names_are_plain() {
        let identity = Identity::new("eu-west", "node-7.gpu").unwrap();
        assert_eq!(identity.to_string(), "towline://eu-west/node-7.gpu");
        assert_eq!(identity.to_string().parse::<Identity>().unwrap(), identity);
        for bad in ["", "-a", "A", "a/b", "a b", "\u{e9}", &"a".repeat(64)] {
            assert!(Identity::new(bad, "a").is_err(), "{bad:?}");
            assert!(Identity::new("a", bad).is_err(), "{bad:?}");
        }
        for bad in ["", "towline://", "towline://a", "spiffe://a", "towline://a/b/c"] {
            assert!(bad.parse::<Identity>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn spiffe_ids_are_those_of_workloads_and_no_agents() {
        let id = "spiffe://prod.example.org/ns/ml/sa/Trainer_1";
        let workload = Identity::spiffe(id).unwrap();
        assert!(workload.is_spiffe() && !Identity::new("spiffe", "a").unwrap().is_spiffe());
        assert_eq!((workload.to_string(), workload.path()), (id.to_owned(), id.to_owned()));
        assert_eq!(id.parse::<Identity>().unwrap(), workload);
        let long = format!("spiffe://a/{}", "b".repeat(SPIFFE_LEN_MAX));
        let wide = format!("spiffe://{}/b", "a".repeat(TRUST_DOMAIN_LEN_MAX + 1));
        for bad in [
            "",
            "spiffe://",
            "spiffe://a",
            "spiffe://a/",
            "spiffe:///b",
            "spiffe://a/b/",
            "spiffe://a//b",
            "spiffe://a/../b",
            "spiffe://a/.",
            "spiffe://A/b",
            "spiffe://a:1/b",
            "spiffe://u@a/b",
            "spiffe://a/b?c",
            "spiffe://a/b#c",
            "spiffe://a/%41",
            "SPIFFE://a/b",
            "towline://a/b",
            &long,
            &wide,
        ] {
            assert!(Identity::spiffe(bad).is_err(), "{bad:.80}");
        }
    }
}
