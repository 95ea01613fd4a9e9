//! Names of this machine's users.

use std::path::Path;

use rustix::process::{Uid, getuid};

/// Path of the passwd file (<https://man7.org/linux/man-pages/man5/passwd.5.html>).
const PASSWD: &str = "/etc/passwd";

/// Name of `user`. For a user of a directory service, who is not in the passwd file, it comes from the environment (`USER`,
/// `LOGNAME`) of this process if that is the same user; else it is the number.
#[must_use]
pub fn user_name(user: Uid) -> String {
    let text = std::fs::read_to_string(Path::new(PASSWD)).unwrap_or_default();
    let said = || ["USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok().filter(|said| !said.is_empty()));
    let own = if user == getuid() { said() } else { None };
    named(&text, user.as_raw()).or(own).unwrap_or_else(|| format!("uid {}", user.as_raw()))
}

/// Name of the user with a number, in the text of the passwd file.
fn named(passwd: &str, user: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        (number.parse() == Ok(user) && !name.is_empty()).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_looked_up() {
        let text = "root:x:0:0:root:/root:/bin/sh\n# comment\nbroken\n\nann:x:1000:100::/home/ann:/bin/sh\n";
        assert_eq!(named(text, 0).as_deref(), Some("root"));
        assert_eq!(named(text, 1000).as_deref(), Some("ann"));
        assert_eq!(named(text, 100), None);
    }

    #[test]
    fn everybody_is_called_something() {
        assert!(!user_name(getuid()).is_empty());
        assert_eq!(user_name(Uid::from_raw(u32::MAX - 7)), format!("uid {}", u32::MAX - 7));
    }
}
