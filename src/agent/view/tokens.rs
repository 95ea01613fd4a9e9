//! Tokens, without their secrets.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// Id.
    pub id: String,
    /// Label.
    #[schema(required)]
    pub name: Option<String>,
    /// Tenant whose quota its pins count against.
    #[schema(required)]
    pub tenant: Option<String>,
    /// Scopes.
    pub scopes: Vec<String>,
    /// Time of creation, RFC 3339.
    #[schema(format = DateTime)]
    pub created: String,
    /// Time of expiry, RFC 3339; none if it does not expire.
    #[schema(format = DateTime, required)]
    pub expires: Option<String>,
    /// Time of the last use since the agent started, RFC 3339.
    #[schema(format = DateTime, required)]
    pub used: Option<String>,
}

/// A new token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MadeToken {
    /// The token.
    #[serde(flatten)]
    pub token: Token,
    /// Secret, returned only once.
    pub secret: String,
}

/// Tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenList {
    /// The oldest first; some may have expired.
    pub tokens: Vec<Token>,
}

/// A token that was ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RevokedToken {
    /// Id.
    pub revoked: String,
}
