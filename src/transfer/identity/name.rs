//! Name of an agent.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::transfer::protocol::limits::NAME_LEN_MAX;

/// The scheme of the URI in a certificate.
const SCHEME: &str = "towline://";

/// An agent and the site where it is; in a certificate, and printed, `towline://SITE/AGENT`.
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
                        "1 to {NAME_LEN_MAX} lower-case letters, digits and . _ -, a letter or digit first"
                    ))
                    .got(format!("{:?}", name.chars().take(NAME_LEN_MAX + 1).collect::<String>())));
            }
        }
        Ok(Self { site: site.to_owned(), agent: agent.to_owned() })
    }

    /// Site.
    #[must_use]
    pub fn site(&self) -> &str {
        &self.site
    }

    /// `SITE/AGENT`, as people and patterns write it.
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
    (1..=NAME_LEN_MAX).contains(&name.len())
        && name.bytes().all(|byte| plain(byte) || b"._-".contains(&byte))
        && name.bytes().next().is_some_and(plain)
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.site, self.agent)
    }
}

impl FromStr for Identity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
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
        for bad in ["", "towline://", "towline://a", "spiffe://a/b", "towline://a/b/c"] {
            assert!(bad.parse::<Identity>().is_err(), "{bad:?}");
        }
    }
}
