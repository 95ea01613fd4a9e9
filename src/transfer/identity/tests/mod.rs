//! Tests of identities: who is accepted, who is refused and why, and files that change.

mod signature;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use rustls::pki_types::UnixTime;
use tempfile::TempDir;

use super::credentials::INTERMEDIATES_MAX;
use super::other_forms::other_forms;
use super::revoked::SETTLED;
use super::{Authority, Credentials, client_config, peer_identity, refused, server_config, show};
use crate::clock::{Clock as _, ManualClock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;

/// 2026-11-21.
const NOW: Timestamp = Timestamp(1_795_000_000_000_000_000);

fn after(days: u64) -> Timestamp {
    Timestamp(NOW.0 + i64::try_from(days * 86_400_000_000_000).unwrap())
}

/// Folder with an authority, and a clock.
struct Site {
    folder: TempDir,
    clock: Arc<ManualClock>,
}

impl Site {
    fn new() -> Self {
        let site = Self { folder: tempfile::tempdir().unwrap(), clock: Arc::new(ManualClock::at(NOW)) };
        Authority::create(&site.path("ca"), "test", 3650, NOW).unwrap();
        site
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn issue(&self, agent: &str, days: u32) {
        let identity = Identity::new("west", agent).unwrap();
        let authority = Authority::open(&self.path("ca")).unwrap();
        authority.issue(&(&identity).into(), &self.path(agent), (days, self.clock.now()), true).unwrap();
    }

    fn open(&self, agent: &str) -> Result<Credentials> {
        Credentials::open(&self.path(agent), Arc::clone(&self.clock) as _)
    }

    /// An agent with a certificate of the authority.
    fn agent(&self, agent: &str) -> Credentials {
        self.issue(agent, 365);
        self.open(agent).unwrap()
    }

    /// Advances the clock so that the credentials check their files.
    fn later(&self, time: Duration) {
        self.clock.set(Timestamp(self.clock.now().0 + i64::try_from(time.as_nanos()).unwrap()));
    }
}

/// Result of a whole handshake in memory, for the client and the server: the other's identity, or the error.
fn shake(asker: &Credentials, server: &Credentials) -> (Result<Identity>, Result<Identity>) {
    let name = super::SERVER_NAME.try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(client_config(asker).unwrap()), name).unwrap();
    let mut host = rustls::ServerConnection::new(Arc::new(server_config(server).unwrap())).unwrap();
    let (mut asked, mut served) = (None, None);
    for _ in 0..6 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            host.read_tls(&mut rest).unwrap();
            served = served.or(host.process_new_packets().err());
        }
        let mut bytes = Vec::new();
        while host.wants_write() {
            host.write_tls(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            asked = asked.or(client.process_new_packets().err());
        }
    }
    let seen = |error: Option<rustls::Error>, certificates| match error {
        Some(error) => Err(refused(error)),
        None => peer_identity(certificates, None),
    };
    (seen(asked, client.peer_certificates()), seen(served, host.peer_certificates()))
}

fn words(result: Result<Identity>) -> String {
    result.map_or_else(|error| error.to_string(), |identity| identity.to_string())
}

#[test]
fn agents_of_one_authority_see_each_others_names() {
    let site = Site::new();
    let (asker, server) = (site.agent("asker"), site.agent("server"));
    let (asked, served) = shake(&asker, &server);
    assert_eq!(words(asked), "towline://west/server");
    assert_eq!(words(served), "towline://west/asker");
    assert_eq!(asker.identity().to_string(), "towline://west/asker");
}

#[test]
fn tls_is_1_3_with_aes_128_first() {
    let site = Site::new();
    let agent = site.agent("a");
    let config = client_config(&agent).unwrap();
    let suites = &config.crypto_provider().cipher_suites;
    assert_eq!(suites[0].suite(), rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    assert!(suites.iter().all(|suite| suite.tls13().is_some()));
}

#[test]
fn another_authority_is_not_trusted() {
    let (site, other) = (Site::new(), Site::new());
    let (asked, served) = shake(&site.agent("asker"), &other.agent("server"));
    assert_eq!(words(asked), "certificate was signed by an authority that is not trusted");
    // The server has only received the refusal.
    assert_eq!(words(served), "peer does not trust the authority of our certificate");

    // The client trusts both, the server only its own: now the server refuses.
    let bundle = ["ca/ca.crt"].map(|name| fs::read_to_string(other.path(name)).unwrap()).concat();
    let own = fs::read_to_string(site.path("asker/ca.crt")).unwrap();
    fs::write(site.path("asker/ca.crt"), own + &bundle).unwrap();
    let (asked, served) = shake(&site.open("asker").unwrap(), &other.agent("server"));
    assert_eq!(words(served), "certificate was signed by an authority that is not trusted");
    assert_eq!(words(asked), "peer does not trust the authority of our certificate");
}

#[test]
fn expired_certificates_are_refused_by_the_clock_that_was_given() {
    let site = Site::new();
    site.issue("asker", 10);
    let (asker, server) = (site.open("asker").unwrap(), site.agent("server"));
    site.clock.set(after(9));
    assert!(shake(&asker, &server).1.is_ok());
    site.clock.set(after(11));
    let (_, served) = shake(&asker, &server);
    assert_eq!(words(served), "certificate has expired");
    let error = site.open("asker").unwrap_err();
    assert_eq!((error.kind(), error.to_string().starts_with("certificate has expired")), (ErrorKind::Denied, true));
    assert!(error.place().unwrap().ends_with("asker/tls.crt"));
    site.clock.set(Timestamp(NOW.0 - 2 * 3_600_000_000_000));
    assert!(site.open("server").unwrap_err().to_string().starts_with("certificate is not valid yet"));
}

#[test]
fn revoked_certificates_are_refused_by_serial_and_by_fingerprint() {
    let site = Site::new();
    let (asker, server) = (site.agent("asker"), site.agent("server"));
    let certificate = asker.certificate();
    assert_eq!(certificate.fingerprint.len(), 64);
    let colons: Vec<&str> =
        certificate.fingerprint.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap()).collect();
    for line in [certificate.serial.clone(), format!("00:{}", certificate.serial), colons.join(":").to_uppercase()] {
        fs::write(site.path("server/revoked"), format!("# stolen\n\n{line} # a laptop\n")).unwrap();
        site.later(Duration::from_secs(2));
        let (_, served) = shake(&asker, &server);
        assert_eq!(words(served), "certificate was revoked");
        fs::remove_file(site.path("server/revoked")).unwrap();
        site.later(Duration::from_secs(2));
        assert_eq!(
            words(shake(&asker, &server).1),
            "certificate was revoked",
            "another may be about to take its place"
        );
        site.later(SETTLED);
        assert!(shake(&asker, &server).1.is_ok());
    }
    fs::write(site.path("asker/revoked"), server.certificate().serial).unwrap();
    site.later(Duration::from_secs(2));
    assert_eq!(words(shake(&asker, &server).0), "certificate was revoked");
    let lines = format!("the one of last week\n{}\n", server.certificate().serial);
    fs::write(site.path("asker/revoked"), lines).unwrap();
    let asker = site.open("asker").unwrap();
    assert_eq!(words(shake(&asker, &server).0), "certificate was revoked");
    let problems = asker.problems();
    assert!(problems.len() == 1 && problems[0].contains("revoked, line 1"), "{problems:?}");
    fs::remove_file(site.path("asker/revoked")).unwrap();
    fs::create_dir(site.path("asker/revoked")).unwrap();
    site.later(Duration::from_secs(2));
    assert_eq!(words(shake(&asker, &server).0), "certificate was revoked");
    assert!(site.open("asker").is_err(), "nobody is let in without the list");
}

/// Replaces the certificate in the folder `agent` by `chain`.
fn replace_certificate(site: &Site, agent: &str, chain: &[&[u8]]) {
    let mut pem = String::new();
    for der in chain {
        let text = base64::engine::general_purpose::STANDARD.encode(der);
        writeln!(pem, "-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----").unwrap();
    }
    fs::write(site.path(agent).join("tls.crt"), pem).unwrap();
}

#[test]
fn a_revoked_certificate_is_refused_in_another_form_too() {
    let site = Site::new();
    let (asker, server) = (site.agent("asker"), site.agent("server"));
    let listed = asker.certificate().fingerprint;
    let own = asker.current();
    let forms = other_forms(own.own.end_entity_cert().unwrap());
    let valid = |form: &Vec<u8>| {
        replace_certificate(&site, "asker", &[form]);
        site.open("asker").ok()
    };
    let other = forms.iter().find_map(valid).unwrap();
    assert_ne!(other.certificate().fingerprint, listed);
    assert_eq!(words(shake(&other, &server).1), "towline://west/asker");
    fs::write(site.path("server/revoked"), format!("{listed}\n")).unwrap();
    site.later(Duration::from_secs(1));
    assert_eq!(words(shake(&other, &server).1), "certificate was revoked");
    // An authority cannot be revoked.
    let authority = show(&site.path("ca")).unwrap().remove(0);
    fs::write(site.path("server/revoked"), format!("{listed}\n{}\n", authority.serial)).unwrap();
    site.later(Duration::from_secs(1));
    let problems = server.problems();
    assert!(problems.len() == 1 && problems[0].contains("remove it from ca.crt"), "{problems:?}");
}

#[test]
fn a_stranger_shows_few_intermediate_certificates() {
    let site = Site::new();
    let agent = site.agent("asker");
    let own = agent.current();
    let certificate = own.own.end_entity_cert().unwrap();
    let verified = |intermediates: usize| {
        let between = vec![certificate.clone(); intermediates];
        let now = UnixTime::since_unix_epoch(NOW.since(Timestamp(0)));
        let [client, server] =
            [own.verify_client(certificate, &between, now), own.verify_server(certificate, &between, now)];
        [client, server].map(|result| words(result.map_err(refused)))
    };
    assert_eq!(verified(INTERMEDIATES_MAX), ["towline://west/asker"; 2]);
    assert_eq!(verified(INTERMEDIATES_MAX + 1), ["certificate is not accepted"; 2]);
    let chain: Vec<&[u8]> = vec![certificate; 2 + INTERMEDIATES_MAX];
    replace_certificate(&site, "asker", &chain);
    let error = site.open("asker").unwrap_err();
    assert!(format!("{error:?}").contains("too many intermediate certificates"), "{error:?}");
}

#[test]
fn a_list_holds_though_certificates_cannot_be_read_or_are_on_it() {
    let site = Site::new();
    let (asker, server) = (site.agent("asker"), site.agent("server"));
    fs::write(site.path("server/tls.crt"), "half of a certif").unwrap();
    let lines = format!("{}\n{}\n", asker.certificate().serial, server.certificate().serial);
    fs::write(site.path("server/revoked"), lines).unwrap();
    site.later(Duration::from_secs(2));
    assert_eq!(words(shake(&asker, &server).1), "certificate was revoked");
    let problems = server.problems();
    assert!(problems.len() == 1 && problems[0].contains("cannot use the changed certificates"), "{problems:?}");
}

#[test]
fn changed_files_are_read_again_and_unusable_ones_change_nothing() {
    let site = Site::new();
    let (asker, server) = (site.agent("asker"), site.agent("server"));
    let before = asker.certificate();
    site.issue("asker", 100);
    assert_eq!(asker.certificate(), before, "it looks once a second, not at each call");
    site.later(Duration::from_secs(2));
    let renewed = asker.certificate();
    assert_ne!(renewed, before);
    assert!(shake(&asker, &server).1.is_ok());

    // A key that does not match the certificate, as during a change; then a file that is not PEM.
    fs::copy(site.path("server/tls.key"), site.path("asker/tls.key")).unwrap();
    site.later(Duration::from_secs(2));
    assert_eq!(asker.certificate(), renewed);
    fs::write(site.path("asker/tls.crt"), "not a certificate").unwrap();
    site.later(Duration::from_secs(2));
    assert_eq!(asker.certificate(), renewed);
    assert!(shake(&asker, &server).1.is_ok());
    assert_eq!(site.open("asker").unwrap_err().kind(), ErrorKind::Damaged);
}

#[test]
fn keys_are_for_their_owner_and_an_authority_is_never_overwritten() {
    let site = Site::new();
    let agent = site.agent("a");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&site.path("ca/ca.key")), 0o600);
    assert_eq!(mode(&site.path("a/tls.key")), 0o600);
    assert_eq!(mode(&site.path("a/tls.crt")) & 0o444, 0o444 & mode(&site.path("a/tls.crt")));
    let files = |folder: &str| {
        let mut names: Vec<_> = fs::read_dir(site.path(folder)).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(agent.problems(), Vec::<String>::new());
    fs::set_permissions(site.path("a/ca.crt"), fs::Permissions::from_mode(0o664)).unwrap();
    site.later(Duration::from_secs(2));
    let place = site.path("a/ca.crt");
    let (place, owner) = (place.display(), rustix::process::geteuid().as_raw());
    let expected = format!("{place}: others may write it (owner {owner}, mode 0664): `chmod go-w {place}`");
    assert_eq!(agent.problems(), [expected]);
    fs::set_permissions(site.path("a/ca.crt"), fs::Permissions::from_mode(0o644)).unwrap();
    site.later(Duration::from_secs(2));
    assert_eq!(agent.problems(), Vec::<String>::new());
    assert_eq!(files("ca"), ["ca.crt", "ca.key"]);
    assert_eq!(files("a"), ["ca.crt", "tls.crt", "tls.key"]);

    let key = fs::read(site.path("ca/ca.key")).unwrap();
    let error = Authority::create(&site.path("ca"), "again", 10, NOW).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    fs::remove_file(site.path("ca/ca.crt")).unwrap();
    assert_eq!(Authority::create(&site.path("ca"), "again", 10, NOW).unwrap_err().kind(), ErrorKind::Conflict);
    assert_eq!(fs::read(site.path("ca/ca.key")).unwrap(), key);
    assert_eq!(files("ca"), ["ca.key"]);
    assert_eq!(Authority::open(&site.path("ca")).unwrap_err().kind(), ErrorKind::NotFound);
    drop(agent);
}

#[test]
fn an_agents_certificate_is_replaced_only_when_asked() {
    let site = Site::new();
    let agent = site.agent("a");
    let authority = Authority::open(&site.path("ca")).unwrap();
    let identity = agent.identity();
    let error = authority.issue(&(&identity).into(), &site.path("a"), (10, NOW), false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let renewed = authority.issue(&(&identity).into(), &site.path("a"), (10, NOW), true).unwrap();
    assert_eq!(renewed.identity, Some(identity.clone()));
    for days in [0, 36_501, 4000] {
        let error = authority.issue(&(&identity).into(), &site.path("b"), (days, NOW), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{days}");
    }
    assert!(!site.path("b").join("tls.crt").exists());
}

/// A certificate as cert-manager would issue it: of an intermediate authority, with an RSA-free chain in tls.crt.
#[test]
fn chains_and_certificates_of_others_work() {
    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
    };
    let authority = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params
    };
    let root_key = KeyPair::generate().unwrap();
    let root = authority("root");
    let root_certificate = root.self_signed(&root_key).unwrap();
    let root = Issuer::new(root, root_key);
    let middle_key = KeyPair::generate().unwrap();
    let middle = authority("middle");
    let middle_certificate = middle.signed_by(&middle_key, &root).unwrap();
    let middle = Issuer::new(middle, middle_key);

    let folder = tempfile::tempdir().unwrap();
    let write = |names: &[&str], usages: Vec<ExtendedKeyUsagePurpose>| {
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        params.extended_key_usages = usages;
        let certificate = params.signed_by(&key, &middle).unwrap();
        fs::write(folder.path().join("tls.crt"), certificate.pem() + &middle_certificate.pem()).unwrap();
        fs::write(folder.path().join("tls.key"), key.serialize_pem()).unwrap();
        fs::write(folder.path().join("ca.crt"), root_certificate.pem()).unwrap();
        Credentials::open(folder.path(), Arc::new(ManualClock::at(NOW)))
    };
    let both = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let agent = write(&["https://elsewhere/x", "towline://east/pod-1"], both.clone()).unwrap();
    assert_eq!(words(shake(&agent, &agent).1), "towline://east/pod-1");
    assert_eq!(show(folder.path()).unwrap().len(), 3);

    // A SPIFFE id is taken where it is the only URI; beside a name of ours it is another URI.
    let workload = write(&["spiffe://east.example.org/ns/ml/pod-1"], both.clone()).unwrap();
    assert_eq!(words(shake(&workload, &workload).1), "spiffe://east.example.org/ns/ml/pod-1");
    assert!(workload.identity().is_spiffe());
    let agent = write(&["spiffe://east/pod-1", "towline://east/pod-1"], both.clone()).unwrap();
    assert_eq!(agent.identity().to_string(), "towline://east/pod-1");

    // Named for nobody, for two, or for half of what an agent does.
    let kind = |result: Result<Credentials, Error>| result.unwrap_err().kind();
    for bad in [&["spiffe://east"][..], &["spiffe://east/a", "spiffe://east/b"], &["spiffe://east/a", "https://x/y"]] {
        assert_eq!(kind(write(bad, both.clone())), ErrorKind::Denied, "{bad:?}");
    }
    assert_eq!(kind(write(&["towline://a/b", "towline://a/c"], both)), ErrorKind::Damaged);
    let half = vec![ExtendedKeyUsagePurpose::ServerAuth];
    assert_eq!(kind(write(&["towline://east/pod-1"], half)), ErrorKind::Denied);
}

#[test]
fn who_answers_must_be_who_was_called() {
    let site = Site::new();
    let agent = site.agent("a");
    let current = agent.current();
    let chain = current.own.cert.as_slice();
    let identity = |name| Identity::new("west", name).unwrap();
    assert_eq!(peer_identity(Some(chain), Some(&identity("a"))).unwrap(), identity("a"));
    assert_eq!(peer_identity(Some(chain), Some(&identity("b"))).unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(peer_identity(None, None).unwrap_err().kind(), ErrorKind::Denied);
    let now = UnixTime::since_unix_epoch(NOW.since(Timestamp(0)));
    assert_eq!(current.verify_client(&chain[0], &[], now).unwrap(), identity("a"));
}

#[test]
fn missing_files_are_named_with_the_way_to_make_them() {
    let site = Site::new();
    let error = site.open("nobody").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.help_text().unwrap().starts_with("towline identity issue SITE/AGENT --to "));
    assert_eq!(show(&site.path("nobody")).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(show(&site.path("ca")).unwrap()[0].authority);
}
