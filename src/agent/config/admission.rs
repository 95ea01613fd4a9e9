//! Section `[admission]`: limits of connections and requests of other agents.

use serde::Deserialize;

use super::quantity::Span;
use crate::error::{Error, Result};
use crate::transfer::Admission;

/// The section `[admission]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AdmissionSection {
    handshakes: Option<usize>,
    handshakes_per_address: Option<usize>,
    handshake: Option<Span>,
    links: Option<usize>,
    links_per_agent: Option<usize>,
    requests_per_second: Option<u32>,
}

impl AdmissionSection {
    /// # Errors
    /// Usage, for a limit of 0, with which nobody could connect.
    pub(super) fn settle(self) -> Result<Admission> {
        let usual = Admission::default();
        let admission = Admission {
            handshakes: self.handshakes.unwrap_or(usual.handshakes),
            handshakes_per_address: self.handshakes_per_address.unwrap_or(usual.handshakes_per_address),
            handshake: self.handshake.map_or(usual.handshake, |span| span.0),
            links: self.links.unwrap_or(usual.links),
            links_per_agent: self.links_per_agent.unwrap_or(usual.links_per_agent),
            requests_per_second: self.requests_per_second.unwrap_or(usual.requests_per_second),
        };
        let nothing = [
            ("handshakes", admission.handshakes == 0),
            ("handshakes_per_address", admission.handshakes_per_address == 0),
            ("handshake", admission.handshake.is_zero()),
            ("links", admission.links == 0),
            ("links_per_agent", admission.links_per_agent == 0),
            ("requests_per_second", admission.requests_per_second == 0),
        ];
        match nothing.iter().find(|(_, is_nothing)| *is_nothing) {
            Some((name, _)) => Err(Error::usage(format!("[admission] {name} is 0: nobody could connect"))
                .expected("at least 1")
                .help("omit `listen` if nobody is to connect")),
            None => Ok(admission),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_none_is_nothing() {
        let settle = |text: &str| toml::from_str::<AdmissionSection>(text).unwrap().settle();
        assert_eq!(settle("").unwrap(), Admission::default());
        let admission = settle("handshake = '2s'\nlinks_per_agent = 4").unwrap();
        assert_eq!((admission.handshake.as_secs(), admission.links_per_agent), (2, 4));
        assert_eq!(
            Admission { handshake: Admission::default().handshake, links_per_agent: 64, ..admission },
            Admission::default()
        );
        for text in ["links = 0", "handshake = 0", "requests_per_second = 0"] {
            assert!(settle(text).unwrap_err().to_string().contains("nobody could connect"), "{text}");
        }
        assert!(toml::from_str::<AdmissionSection>("places = 3").is_err());
    }
}
