//! `towline token`: part of the rights at the agent's API, for processes of this node.

use serde::Serialize;

use super::args::TokenVerb;
use super::output::{printable, table};
use super::verbs::Context;
use crate::agent::Client;
use crate::agent::view::{MadeToken, RevokedToken, Token, TokenList};
use crate::error::{Error, Result};
use crate::policy::Scopes;
use crate::span;

/// Body of a request for a token.
#[derive(Debug, Serialize)]
struct TokenRequest {
    scopes: Vec<String>,
    name: Option<String>,
    tenant: Option<String>,
    expires: Option<String>,
}

impl Context {
    pub(super) async fn token(&self, what: TokenVerb) -> Result<()> {
        match what {
            TokenVerb::New { scopes, name, tenant, expires } => {
                // A mistake is found without an agent, too.
                Scopes::of(&scopes)?;
                self.new_token(&TokenRequest { scopes, name, tenant, expires: expires.map(span::show) }).await
            }
            TokenVerb::List => self.tokens().await,
            TokenVerb::Revoke { ids } => self.revoke(&ids).await,
        }
    }

    async fn new_token(&self, asked: &TokenRequest) -> Result<()> {
        let made: MadeToken = Client::required()?.post("/v1/tokens", asked).await?;
        let until = made.token.expires.as_ref().map_or_else(|| "it is revoked".to_owned(), |at| printable(at));
        self.output
            .remark(&format!("token {}, until {until}; its secret is shown this once:", printable(&made.token.id)));
        self.output.answer(&made, |made, _| format!("{}\n", printable(&made.secret)))
    }

    async fn tokens(&self) -> Result<()> {
        let all: TokenList = Client::required()?.get("/v1/tokens").await?;
        if all.tokens.is_empty() {
            self.output.remark("there are no tokens");
        }
        self.output.answer(&all, |all, _| listed(&all.tokens))
    }

    async fn revoke(&self, ids: &[String]) -> Result<()> {
        #[derive(Serialize)]
        struct All {
            revoked: Vec<String>,
        }
        if let Some(id) = ids.iter().find(|id| !id.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
            return Err(Error::usage("this is not an id").got(id).help("`towline token list` lists them"));
        }
        let agent = Client::required()?;
        let mut all = All { revoked: Vec::new() };
        for id in ids {
            let RevokedToken { revoked } = agent.delete(&format!("/v1/tokens/{id}")).await?;
            all.revoked.push(revoked);
        }
        self.output.report(&all, |all, _| format!("revoked {}\n", printable(&all.revoked.join(", "))))
    }
}

/// The tokens as a table.
fn listed(tokens: &[Token]) -> String {
    let or = |text: &Option<String>, none: &str| text.as_deref().map_or_else(|| none.to_owned(), printable);
    let row = |token: &Token| {
        vec![
            printable(&token.id),
            or(&token.name, ""),
            or(&token.tenant, ""),
            token.created.clone(),
            or(&token.expires, "never"),
            or(&token.used, "not since start"),
            printable(&token.scopes.join(" ")),
        ]
    };
    let rows: Vec<_> = tokens.iter().map(row).collect();
    table(&["TOKEN", "NAME", "TENANT", "CREATED", "EXPIRES", "USED", "SCOPES"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_says_until_when_and_what_for() {
        let token = Token {
            id: "01A".into(),
            name: Some("ci".into()),
            tenant: None,
            scopes: vec!["read=run/**".into(), "warm".into()],
            created: "2026-01-01T00:00:00Z".into(),
            expires: None,
            used: None,
        };
        let text = listed(&[token]);
        assert!(
            text.contains("01A") && text.contains("never") && text.ends_with("not since start  read=run/** warm\n"),
            "{text}"
        );
    }
}
