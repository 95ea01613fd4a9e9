//! Redaction of errors for other agents: paths, locations and addresses are private to this node.

use std::net::SocketAddr;

use serde_json::Value;

/// Replacement for a path, a location or an address.
const HIDDEN: &str = "(hidden)";

/// Removes paths, locations, addresses and causes from `error`, which has the shape of `towline --json`. They stay in this node's log.
pub(super) fn redact(error: &mut Value) {
    let Some(fields) = error.as_object_mut() else { return };
    let place = fields.get("place").and_then(Value::as_str).map(str::to_owned);
    let place = place.filter(|place| is_location(place) || place.split_whitespace().any(is_location));
    if let Some(place) = &place {
        fields.insert("place".to_owned(), Value::Null);
        // The place is removed whole, because a path may contain spaces.
        if let Some(Value::String(message)) = fields.get_mut("message") {
            *message = message.replace(&format!(" at {place}"), "");
        }
    }
    for text in ["message", "help"] {
        if let Some(Value::String(text)) = fields.get_mut(text) {
            *text = without_locations(text);
        }
    }
    if let Some(Value::Array(causes)) = fields.get_mut("causes") {
        causes.clear();
    }
}

/// `text` with each path, location and address replaced.
pub(super) fn without_locations(text: &str) -> String {
    let words = text.split(' ').map(|word| if is_location(word) || is_address(word) { HIDDEN } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// True for an absolute path or a URL, even in quotes.
fn is_location(word: &str) -> bool {
    let bare = word.trim_start_matches(['`', '"', '\'', '(', '[', '<']);
    bare.len() > 1 && bare.starts_with('/') || bare.contains("://")
}

/// True for `HOST:PORT`, also with punctuation around it.
fn is_address(word: &str) -> bool {
    let bare = word.trim_matches(['`', '"', '\'', '(', ')', ',', ';', ':', '.']);
    let is_host = |host: &str| {
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
    };
    bare.parse::<SocketAddr>().is_ok()
        || bare.rsplit_once(':').is_some_and(|(host, port)| is_host(host) && port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::error::Error;

    fn redacted(error: &Error) -> Value {
        let mut value = serde_json::to_value(error).unwrap();
        redact(&mut value);
        value
    }

    #[test]
    fn paths_and_locations_are_hidden_and_the_rest_stays() {
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let error = redacted(&Error::io("cannot write a file", Path::new("/srv/my data/secret/x"), full));
        assert_eq!(error["message"], "disk full: cannot write a file");
        assert_eq!((&error["place"], &error["causes"]), (&Value::Null, &serde_json::json!([])));
        assert_eq!(error["kind"], "exhausted");

        let missing = Error::not_found("no such name `run` in s3://bucket/secret; the nearest is `run-1`")
            .at("run")
            .help("look at `/etc/secret` or (https://secret/x)")
            .source(Error::other("lower").at("/secret"));
        let error = redacted(&missing);
        assert_eq!(error["message"], "no such name `run` in (hidden) the nearest is `run-1` at run");
        assert_eq!(error["place"], "run");
        assert!(!error.to_string().contains("secret"), "{error}");
    }

    #[test]
    fn addresses_of_other_agents_are_hidden() {
        let text = "no answer from 10.0.0.1:7171: no route; [2001:db8::1]:7171, agent-1.example.org:7171 (x:1), by 2026-11-29T07:10:22Z";
        let expected = "no answer from (hidden) no route; (hidden) (hidden) (hidden) by 2026-11-29T07:10:22Z";
        assert_eq!(without_locations(text), expected);
    }
}
