//! Other forms of a certificate: the same content, signed by the same signature in another form.
//!
//! An ECDSA signature (r, s) is valid exactly if (r, n - s) is, where n is the order of the curve (SEC 1, version 2.0, 4.1.4:
//! <https://www.secg.org/sec1-v2.pdf>). So whoever has a certificate can make another one with the same content and another
//! fingerprint.

use std::borrow::Cow;

use x509_parser::asn1_rs::{Any, BitString, FromDer as _, Integer, Sequence, ToDer as _};
use x509_parser::num_bigint::BigUint;

/// Orders of P-256, P-384 and P-521, in hexadecimal digits (NIST SP 800-186, 3.2.1: <https://doi.org/10.6028/NIST.SP.800-186>).
const ORDERS: [&str; 3] = [
    "ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551",
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973",
    "01fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffa51868783bf2f966b7fcc0148f709a5d03bb5c9b8899c47aeb\
     b6fb71e91386409",
];

/// Other forms of the certificate `der`, in DER: one for each curve that its issuer's key may be of. None, if it is not signed with
/// ECDSA.
pub(super) fn other_forms(der: &[u8]) -> Vec<Vec<u8>> {
    forms(der).unwrap_or_default()
}

fn forms(der: &[u8]) -> Option<Vec<Vec<u8>>> {
    // SEQUENCE { what is signed, algorithm, BIT STRING { SEQUENCE { INTEGER r, INTEGER s } } }
    let (_, certificate) = Sequence::from_der(der).ok()?;
    let content: &[u8] = &certificate.content;
    let (rest, _) = Any::from_der(content).ok()?;
    let (rest, _) = Any::from_der(rest).ok()?;
    let signed = content.get(..content.len() - rest.len())?;
    let (_, signature) = BitString::from_der(rest).ok()?;
    let (_, pair) = Sequence::from_der(&signature.data).ok()?;
    let (after, _) = Integer::from_der(&pair.content).ok()?;
    let r = pair.content.get(..pair.content.len() - after.len())?;
    let (_, s) = Integer::from_der(after).ok()?;
    let s = BigUint::from_bytes_be(s.as_ref());
    let orders = ORDERS.iter().filter_map(|digits| BigUint::parse_bytes(digits.as_bytes(), 16));
    let others = orders.filter(|order| s < *order).map(|order| order - &s);
    Some(others.filter_map(|other| signed_by(signed, r, &other)).collect())
}

/// Certificate of `signed`, what is signed and the algorithm, with the signature of `r`, a DER integer, and `s`.
fn signed_by(signed: &[u8], r: &[u8], s: &BigUint) -> Option<Vec<u8>> {
    // Integers have a sign.
    let mut digits = s.to_bytes_be();
    if digits.first().is_some_and(|first| *first >= 0x80) {
        digits.insert(0, 0);
    }
    let sequence = |parts: &[&[u8]]| Sequence::new(Cow::Owned(parts.concat())).to_der_vec().ok();
    let pair = sequence(&[r, &Integer::new(&digits).to_der_vec().ok()?])?;
    sequence(&[signed, &BitString::new(0, &pair).to_der_vec().ok()?])
}

#[cfg(test)]
mod tests {
    use rcgen::{
        CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ECDSA_P521_SHA512,
        PKCS_ED25519,
    };
    use rustls::crypto::aws_lc_rs::default_provider;
    use x509_parser::prelude::X509Certificate;

    use super::*;

    /// True if a key of one of the algorithms of TLS verifies the signature of `der`, which signed itself.
    fn is_signed(der: &[u8]) -> bool {
        let (_, certificate) = X509Certificate::from_der(der).unwrap();
        let key: &[u8] = &certificate.public_key().subject_public_key.data;
        let (message, signature) = (certificate.tbs_certificate.as_ref(), &certificate.signature_value.data);
        let algorithms = default_provider().signature_verification_algorithms.all;
        algorithms.iter().any(|one| one.verify_signature(key, message, signature).is_ok())
    }

    #[test]
    fn the_other_form_is_signed_too_and_its_other_form_is_the_first() {
        for algorithm in [&PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384, &PKCS_ECDSA_P521_SHA512] {
            for _ in 0..16 {
                let key = KeyPair::generate_for(algorithm).unwrap();
                let made = CertificateParams::default().self_signed(&key).unwrap();
                let others = other_forms(made.der());
                let signed: Vec<_> = others.iter().filter(|other| is_signed(other)).collect();
                assert!(signed.len() == 1 && signed[0] != made.der().as_ref(), "{algorithm:?}");
                assert!(other_forms(signed[0]).iter().any(|back| back == made.der().as_ref()), "{algorithm:?}");
            }
        }
    }

    #[test]
    fn what_is_not_signed_with_ecdsa_has_no_other_form() {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let made = CertificateParams::default().self_signed(&key).unwrap();
        assert!(other_forms(made.der()).is_empty());
        for len in 0..made.der().len() {
            assert!(other_forms(&made.der()[..len]).is_empty());
        }
    }
}
