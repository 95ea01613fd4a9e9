//! Endpoints of S3 servers, and the rule for plain http.

use std::borrow::Cow;

use url::{Host, Url};

use crate::error::{Error, Result};

/// Refuses an endpoint that is no plain http or https URL, and plain http over a network unless it is allowed explicitly.
pub(super) fn check_endpoint(endpoint: &str, allow_http: bool) -> Result<()> {
    let url = parse_endpoint(endpoint)?;
    if url.scheme() == "https" || allow_http || is_loopback(&url) {
        return Ok(());
    }
    Err(Error::denied("endpoint would send data and names in clear over the network")
        .at(endpoint)
        .help("use https, or say --allow-http if that network is trusted"))
}

/// `address` without what it has between its scheme and its last `@`, which may be a secret.
pub(crate) fn without_user(address: &str) -> Cow<'_, str> {
    let Some((user, rest)) = address.rsplit_once('@') else { return address.into() };
    match user.split_once(":/") {
        // The sign stands in a path: `s3://bucket/run@2`.
        Some((_, place)) if !place.contains(':') && place.trim_start_matches('/').contains('/') => address.into(),
        Some((scheme, _)) if is_scheme(scheme) => format!("{scheme}://***@{rest}").into(),
        _ => format!("***@{rest}").into(),
    }
}

/// True for a scheme of RFC 3986 section 3.1; anything else before `://` is part of a path.
pub(super) fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

/// Parses an endpoint like the HTTP clients do, so that the checked host is the one that is connected to. User information, which
/// can hide the host from a human reader, is refused.
fn parse_endpoint(endpoint: &str) -> Result<Url> {
    let malformed =
        |what: &'static str| Error::usage(what).at(without_user(endpoint)).help("write https://HOST[:PORT]");
    // URL parsers treat these characters differently.
    if endpoint.bytes().any(|byte| !byte.is_ascii_graphic() || byte == b'\\') {
        return Err(malformed("endpoint is not a URL"));
    }
    let url = Url::parse(endpoint).map_err(|source| malformed("endpoint is not a URL").source(source))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(malformed("endpoint is not an http or https URL"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        // The text may contain a secret, so it is not shown.
        return Err(Error::usage("endpoint has user information before its host")
            .at(url.host_str().unwrap_or_default())
            .help("write https://HOST[:PORT]; credentials come from where AWS tools look"));
    }
    if url.host().is_none() {
        return Err(malformed("endpoint has no host"));
    }
    Ok(url)
}

/// True if data to `endpoint` crosses a network in plain http.
pub(super) fn is_in_clear(endpoint: &str) -> bool {
    parse_endpoint(endpoint).is_ok_and(|url| url.scheme() == "http" && !is_loopback(&url))
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn plain_http_stays_on_this_machine_unless_allowed() {
        for local in ["http://127.0.0.1:9000", "http://localhost", "http://[::1]:80/x", "http://127.8.8.8"] {
            check_endpoint(local, false).unwrap();
        }
        for far in ["http://10.0.0.1:9000", "http://localhost.example.com", "http://127.0.0.1.nip.io"] {
            assert_eq!(check_endpoint(far, false).unwrap_err().kind(), ErrorKind::Denied, "{far}");
            check_endpoint(far, true).unwrap();
        }
        check_endpoint("https://s3.example.com", false).unwrap();
        for malformed in
            ["s3.example.com", "ftp://s3.example.com", "http://", "http://192.0.2.1\\@localhost", "http://local\thost"]
        {
            let error = check_endpoint(malformed, true).map_err(|error| error.kind());
            assert_eq!(error, Err(ErrorKind::Usage), "{malformed}");
        }
    }

    #[test]
    fn what_only_looks_like_loopback_is_not() {
        for far in [
            "http://127.0.0.1:9@192.0.2.1:9000",
            "http://localhost@192.0.2.1",
            "https://key:hush@s3.example.com",
            "http://u:hush@bad:port",
            "u:hush@host",
            "ftp://u:hu@sh@host",
            "http://u:hush sh@host",
        ] {
            for allow_http in [false, true] {
                let error = check_endpoint(far, allow_http).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Usage, "{far}");
                assert!(!format!("{error:?}").contains("hush"), "{error:?}");
            }
        }
        assert_eq!(without_user("http://u:hu@sh@bad:port/x"), "http://***@bad:port/x");
        assert_eq!(without_user("u:hush://sh@host"), "***@host");
        assert_eq!(without_user("s3://bucket/p"), "s3://bucket/p");
        // The rest is a path, a query or a fragment of another host.
        for far in ["http://192.0.2.1/@127.0.0.1", "http://192.0.2.1?@127.0.0.1", "http://192.0.2.1#@localhost"] {
            assert_ne!(check_endpoint(far, false).map_err(|error| error.kind()), Ok(()), "{far}");
            assert!(is_in_clear(far), "{far}");
        }
        for near in ["http://LOCALHOST:9000", "http://2130706433", "http://0x7f.1", "http://[::1]"] {
            check_endpoint(near, false).unwrap();
        }
    }
}
