//! Tests of detached signatures: whose hold, for what, and when.
//!
//! S10: "Agents refuse connections with that certificate. A policy signed by an agent's key, or by a key with any other
//! usage, is refused. Signed bytes begin with their purpose, so a signature for one purpose never passes for another."

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use super::super::{
    Authority, Certificate, Context, Credentials, PolicyKey, SIGNATURE_LEN_MAX, Signature, Trusted, show,
};
use super::{NOW, Site, after, shake, words};
use crate::error::ErrorKind;

const MESSAGE: &[u8] = b"the head of a log";

fn policy_key(site: &Site) -> PolicyKey {
    let authority = Authority::open(&site.path("ca")).unwrap();
    authority.issue_policy_key(&site.path("policy"), 30, NOW).unwrap();
    PolicyKey::open(&site.path("policy")).unwrap()
}

fn said(result: crate::Result<Certificate>) -> String {
    result.map_or_else(|error| error.to_string(), |certificate| certificate.subject)
}

#[test]
fn an_agents_signature_holds_for_its_message_alone() {
    let site = Site::new();
    let agent = site.agent("a");
    let signature = agent.sign(Context::AuditHead, MESSAGE).unwrap();
    let trusted = Trusted::read(&site.path("ca"), NOW).unwrap();
    let signer = trusted.verify(&signature, Context::AuditHead, MESSAGE, NOW).unwrap();
    assert_eq!(signer.identity, Some(agent.identity()));
    assert!(agent.trusted().verify(&signature, Context::AuditHead, MESSAGE, NOW).is_ok());

    let changed = trusted.verify(&signature, Context::AuditHead, b"the head of another", NOW);
    assert_eq!(said(changed), "signature does not match the signed content");
    let late = trusted.verify(&signature, Context::AuditHead, MESSAGE, after(366));
    assert_eq!(said(late), "certificate of the signer had expired");
    let other = Trusted::read(&Site::new().path("ca"), NOW).unwrap();
    let strange = other.verify(&signature, Context::AuditHead, MESSAGE, NOW);
    assert_eq!(said(strange), "certificate of the signer was signed by an authority that is not trusted");

    fs::write(site.path("ca/revoked"), format!("{}\n", agent.certificate().serial)).unwrap();
    let trusted = Trusted::read(&site.path("ca"), NOW).unwrap();
    let revoked = trusted.verify(&signature, Context::AuditHead, MESSAGE, NOW).unwrap_err();
    assert!(revoked.to_string().starts_with("certificate of the signer was revoked"), "{revoked}");
}

#[test]
fn an_agents_key_never_signs_policy() {
    let site = Site::new();
    let agent = site.agent("a");
    let trusted = agent.trusted();
    for context in [Context::Policy, Context::Declassification] {
        assert_eq!(agent.sign(context, MESSAGE).unwrap_err().kind(), ErrorKind::Denied);
        // Signed by a program that does not refuse to sign.
        let forged = Signature::make(&agent.current().own, context, MESSAGE).unwrap();
        let refused = trusted.verify(&forged, context, MESSAGE, NOW).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    }
    // An agent's certificate under the name of a policy key is refused.
    fs::copy(site.path("a/tls.crt"), site.path("a/policy.crt")).unwrap();
    fs::copy(site.path("a/tls.key"), site.path("a/policy.key")).unwrap();
    let error = PolicyKey::open(&site.path("a")).unwrap_err();
    assert!(error.to_string().starts_with("certificate may not sign policy"), "{error}");
}

#[test]
fn a_policy_key_signs_policy_and_is_no_agent() {
    let site = Site::new();
    let (agent, key) = (site.agent("a"), policy_key(&site));
    let trusted = agent.trusted();
    for context in [Context::Policy, Context::Declassification] {
        let signature = key.sign(context, MESSAGE).unwrap();
        assert!(trusted.verify(&signature, context, MESSAGE, NOW).unwrap().policy);
        for other in [Context::Policy, Context::Declassification, Context::AuditHead] {
            assert_eq!(trusted.verify(&signature, other, MESSAGE, NOW).is_ok(), other == context, "{other:?}");
        }
    }
    assert_eq!(key.sign(Context::AuditHead, MESSAGE).unwrap_err().kind(), ErrorKind::Denied);
    let forged = Signature::make(&key.own, Context::AuditHead, MESSAGE).unwrap();
    assert!(trusted.verify(&forged, Context::AuditHead, MESSAGE, NOW).is_err());

    // Used as a certificate for TLS: refused when it is read, and by both sides of a connection.
    let folder = site.path("impostor");
    fs::create_dir(&folder).unwrap();
    for (from, to) in [("policy/policy.crt", "tls.crt"), ("policy/policy.key", "tls.key"), ("ca/ca.crt", "ca.crt")] {
        fs::copy(site.path(from), folder.join(to)).unwrap();
    }
    assert_eq!(Credentials::open(&folder, Arc::clone(&site.clock) as _).unwrap_err().kind(), ErrorKind::Denied);
    let current = agent.current();
    let now = rustls::pki_types::UnixTime::since_unix_epoch(NOW.since(crate::clock::Timestamp(0)));
    assert!(current.verify_server(&key.own.cert[0], &[], now).is_err());
    assert!(current.verify_client(&key.own.cert[0], &[], now).is_err());
    assert_eq!(words(shake(&agent, &agent).1), "towline://west/a");
}

#[test]
fn a_certificate_for_policy_and_more_signs_no_policy() {
    use rcgen::{CertificateParams, CustomExtension, ExtendedKeyUsagePurpose, Issuer, KeyPair};
    let site = Site::new();
    let authority_key = KeyPair::from_pem(&fs::read_to_string(site.path("ca/ca.key")).unwrap()).unwrap();
    let authority = fs::read_to_string(site.path("ca/ca.crt")).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&authority, authority_key).unwrap();
    let trusted = Trusted::read(&site.path("ca/ca.crt"), NOW).unwrap();
    let usage = super::super::certificate::POLICY_USAGE;
    // The policy usage and that of a client: 1.3.6.1.5.5.7.3.2.
    let client = [0x06, 8, 0x2b, 6, 1, 5, 5, 7, 3, 2];
    let both = [&[0x30, 32, 0x06, 20], usage, &client].concat();
    for custom in [Some(both), None] {
        let mut params = CertificateParams::default();
        match custom {
            Some(content) => {
                params.custom_extensions = vec![CustomExtension::from_oid_content(&[2, 5, 29, 37], content)];
            }
            None => params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any],
        }
        let key = KeyPair::generate().unwrap();
        let made = params.signed_by(&key, &issuer).unwrap();
        let own = rustls::sign::CertifiedKey::from_der(
            vec![made.der().clone()],
            rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            &super::super::tls::provider(),
        );
        let signature = Signature::make(&own.unwrap(), Context::Policy, MESSAGE).unwrap();
        let refused = trusted.verify(&signature, Context::Policy, MESSAGE, NOW).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    }
}

#[test]
fn signatures_survive_bytes_and_text_and_every_changed_byte_is_noticed() {
    let site = Site::new();
    let agent = site.agent("a");
    let trusted = agent.trusted();
    let signature = agent.sign(Context::AuditHead, MESSAGE).unwrap();
    let bytes = signature.encode().unwrap();
    assert_eq!(Signature::decode(&bytes).unwrap(), signature);
    assert_eq!(signature.to_string().parse::<Signature>().unwrap(), signature);
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        let held = Signature::decode(&changed)
            .and_then(|signature| trusted.verify(&signature, Context::AuditHead, MESSAGE, NOW));
        assert!(held.is_err(), "byte {at}");
        assert!(Signature::decode(&bytes[..at]).is_err(), "cut to {at}");
    }
    for bad in ["0", "zz", "\u{e9}\u{e9}", "", &"00".repeat(SIGNATURE_LEN_MAX + 1)] {
        assert_eq!(bad.parse::<Signature>().unwrap_err().kind(), ErrorKind::Damaged);
    }
    assert!(Signature::decode(&[bytes.as_slice(), &[0]].concat()).is_err());
}

#[test]
fn a_policy_key_is_for_its_owner_is_never_overwritten_and_is_shown() {
    let site = Site::new();
    let key = policy_key(&site);
    let mode = fs::metadata(site.path("policy/policy.key")).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let authority = Authority::open(&site.path("ca")).unwrap();
    let error = authority.issue_policy_key(&site.path("policy"), 30, NOW).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert_eq!(&show(&site.path("policy")).unwrap(), &[key.certificate().clone()]);
    assert_eq!(authority.issue_policy_key(&site.path("b"), 4000, NOW).unwrap_err().kind(), ErrorKind::Usage);
    let error = PolicyKey::open(&site.path("b")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.help_text().unwrap().starts_with("towline identity issue-policy --to "));
}
