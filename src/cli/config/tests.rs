//! Settings files that others may have planted.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

/// A working folder below one that may hold a settings file, and a home folder.
struct Fixture {
    top: TempDir,
    variables: BTreeMap<&'static str, OsString>,
}

impl Fixture {
    fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        for folder in ["project/deep", "home"] {
            fs::create_dir_all(top.path().join(folder)).unwrap();
        }
        let home = top.path().join("home").into_os_string();
        Self { top, variables: BTreeMap::from([("HOME", home)]) }
    }

    fn file(&self) -> PathBuf {
        self.top.path().canonicalize().unwrap().join("project/towline.toml")
    }

    fn write(&self, text: &str) {
        fs::write(self.file(), text).unwrap();
    }

    fn settings(&self, flags: Flags) -> Result<Settings> {
        let folder = self.file().with_file_name("deep");
        Settings::resolve(flags, Environment { folder: &folder, variable: &|name| self.variables.get(name).cloned() })
    }

    fn trusted(&self) -> Trusted {
        Trusted::below(&self.top.path().join("home/.config/towline"))
    }
}

#[test]
fn a_planted_file_decides_nothing_until_it_is_trusted() {
    let fixture = Fixture::new();
    for (text, shown) in [
        ("repository = 's3://evil/x'", "repository = \"s3://evil/x\""),
        ("endpoint = 'https://evil'", "endpoint = \"https://evil\""),
        ("repository = 'near'\nendpoint = 'https://evil'", "repository = \"near\", endpoint = \"https://evil\""),
    ] {
        fixture.write(text);
        let error = fixture.settings(Flags::default()).unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Usage, fixture.file().to_str()), "{error}");
        assert!(error.to_string().contains(shown), "{error}");
        let command = format!("towline config trust {}", fixture.file().display());
        assert!(error.help_text().unwrap().contains(&command), "{:?}", error.help_text());
    }

    let recorded = fixture.trusted().add(&fixture.file()).unwrap();
    assert_eq!(recorded.path, fixture.file());
    let settings = fixture.settings(Flags::default()).unwrap();
    assert_eq!(settings.endpoint.as_deref(), Some("https://evil"));
    assert_eq!(settings.repository, fixture.file().with_file_name("near").to_str().map(str::to_owned));

    // A changed file is not trusted; nor is the same file at another path.
    fixture.write("repository = 'near'\nendpoint = 'https://evi1'");
    assert_eq!(fixture.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
    fixture.trusted().add(fixture.file().parent().unwrap()).unwrap();
    fixture.settings(Flags::default()).unwrap();
    fs::copy(fixture.file(), fixture.file().with_file_name("deep/towline.toml")).unwrap();
    assert_eq!(fixture.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
    fs::remove_file(fixture.file().with_file_name("deep/towline.toml")).unwrap();

    assert_eq!(fixture.trusted().remove(&fixture.file()).unwrap(), fixture.file());
    assert_eq!(fixture.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(fixture.trusted().remove(&fixture.file()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn what_flags_and_variables_say_needs_no_trust() {
    let mut fixture = Fixture::new();
    fixture.write("repository = 's3://evil/x'\nmemory = '64M'");
    let flags = Flags { repository: Some("/flag".into()), ..Flags::default() };
    let settings = fixture.settings(flags.clone()).unwrap();
    assert_eq!((settings.repository.as_deref(), settings.memory), (Some("/flag"), Some(64 << 20)));
    // The endpoint is another decision, if there is a store to reach: then the file is refused, else it is not used.
    fixture.write("repository = 's3://evil/x'\nendpoint = 'https://evil'\nallow_http = true");
    let unused = fixture.settings(flags).unwrap();
    assert_eq!((unused.repository.as_deref(), unused.endpoint, unused.allow_http), (Some("/flag"), None, false));
    fixture.write("repository = 's3://evil/x'\nendpoint = 'https://evil'");
    let flags = Flags { repository: Some("s3://mine/x".into()), ..Flags::default() };
    assert!(fixture.settings(flags.clone()).unwrap_err().to_string().contains("https://evil"));
    fixture.variables.insert("AWS_ENDPOINT_URL", "https://mine".into());
    fixture.settings(flags).unwrap();
    fixture.write("memory = '64M'");
    fixture.variables.clear();
    assert_eq!(fixture.settings(Flags::default()).unwrap().memory, Some(64 << 20));
}

#[test]
fn what_the_arguments_name_needs_no_trust() {
    let fixture = Fixture::new();
    let flags =
        |places: &[&str]| Flags { places: places.iter().map(|&place| place.into()).collect(), ..Flags::default() };
    fixture.write("repository = 's3://evil/x'\nendpoint = 'https://evil'\nallow_http = true");
    let unused = fixture.settings(flags(&["/from", "to"])).unwrap();
    assert_eq!((unused.repository, unused.endpoint, unused.allow_http), (None, None, false));
    for places in [["/from", "s3://mine/x"], ["s3://mine/x", "file:///to"]] {
        fixture.write("repository = 's3://evil/x'\nendpoint = 'https://evil'");
        let error = fixture.settings(flags(&places)).unwrap_err().to_string();
        assert!(error.contains("https://evil") && !error.contains("s3://evil"), "{error}");
        fixture.write("allow_http = true");
        assert!(fixture.settings(flags(&places)).unwrap_err().to_string().contains("allow_http"));
        fixture.write("repository = 's3://evil/x'");
        assert_eq!(fixture.settings(flags(&places)).unwrap().repository, None);
    }
    fs::set_permissions(fixture.file(), Permissions::from_mode(0o666)).unwrap();
    fixture.settings(flags(&["/from"])).unwrap();
    assert_eq!(fixture.settings(flags(&[])).unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn a_planted_file_lowers_the_memory_and_does_not_raise_it() {
    let mut fixture = Fixture::new();
    let memory = |fixture: &Fixture, flags: Flags| fixture.settings(flags).unwrap().memory;
    fixture.write("memory = '64M'");
    assert_eq!(memory(&fixture, Flags::default()), Some(64 << 20));
    fixture.write("memory = '1T'");
    assert_eq!(memory(&fixture, Flags::default()), None, "the default");
    assert_eq!(memory(&fixture, Flags { memory: Some(2 << 40), ..Flags::default() }), Some(2 << 40));
    fixture.trusted().add(&fixture.file()).unwrap();
    assert_eq!(memory(&fixture, Flags::default()), Some(1 << 40));
    // Nor where nothing can be trusted; the user's own file may say anything.
    fixture.trusted().remove(&fixture.file()).unwrap();
    let home = fixture.variables.remove("HOME").unwrap();
    assert_eq!(memory(&fixture, Flags::default()), None);
    fixture.variables.insert("HOME", home);
    let own = fixture.top.path().join("home/.config/towline/towline.toml");
    fs::rename(fixture.file(), own).unwrap();
    assert_eq!(memory(&fixture, Flags::default()), Some(1 << 40));
}

#[test]
fn plain_http_is_never_allowed_by_a_file_of_a_folder() {
    let mut fixture = Fixture::new();
    fixture.write("allow_http = true");
    fixture.trusted().add(&fixture.file()).unwrap();
    let error = fixture.settings(Flags::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.help_text().unwrap().contains("TOWLINE_ALLOW_HTTP=1"));
    let flags = Flags { allow_http: true, ..Flags::default() };
    assert!(fixture.settings(flags).unwrap().allow_http);
    fixture.variables.insert("TOWLINE_ALLOW_HTTP", "1".into());
    assert!(fixture.settings(Flags::default()).unwrap().allow_http);
    fixture.variables.insert("TOWLINE_ALLOW_HTTP", "perhaps".into());
    assert_eq!(fixture.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn what_others_may_write_is_refused_trusted_or_not() {
    let fixture = Fixture::new();
    fixture.write("repository = 'near'");
    fixture.trusted().add(&fixture.file()).unwrap();
    let own = fixture.top.path().join("home/.config/towline/towline.toml");
    fs::write(&own, "repository = '/own'").unwrap();
    for file in [fixture.file(), own] {
        fs::set_permissions(&file, Permissions::from_mode(0o664)).unwrap();
        let error = fixture.settings(Flags::default()).unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Denied, file.to_str()), "{error}");
        // It keeps nobody from working who says where to.
        let flags = Flags { repository: Some("/flag".into()), ..Flags::default() };
        assert_eq!(fixture.settings(flags).unwrap().repository.as_deref(), Some("/flag"));
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn records_are_the_users_own() {
    let fixture = Fixture::new();
    fixture.write("repository = 'near'");
    fixture.trusted().add(&fixture.file()).unwrap();
    let folder = fixture.top.path().join("home/.config/towline/trusted");
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    let records: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [record] = records.as_slice() else { panic!("{records:?}") };
    assert_eq!(fs::metadata(record).unwrap().mode() & 0o777, 0o600);
    fs::set_permissions(record, Permissions::from_mode(0o666)).unwrap();
    assert_eq!(fixture.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn a_command_to_paste_is_one_word_whatever_the_folder_is_called() {
    assert_eq!(trust::command(Path::new("/a/towline.toml")), "towline config trust /a/towline.toml");
    let command = trust::command(Path::new("/a b/$(rm)/it's/towline.toml"));
    assert_eq!(command, r"towline config trust '/a b/$(rm)/it'\''s/towline.toml'");
}
