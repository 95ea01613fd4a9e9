//! Output of picklers is read; bombs and nonsense are refused, or cost no more than their bytes.

use super::*;

fn parse(bytes: &[u8]) -> Result<Pickle<'_>, ParseError> {
    Pickle::parse(bytes, &mut |_| true)
}

fn refusal(bytes: &[u8]) -> &'static str {
    parse(bytes).expect_err("refused").what
}

#[test]
fn values_of_all_kinds_are_told_apart() {
    // pickle.dumps({"a": [1, -2, 1 << 40, None, 1.5, (1, 2, 3), {4}]}, 4), with the numbers in every width.
    let bytes = b"\x80\x04\x95\x2f\0\0\0\0\0\0\0}\x94\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xff\x8a\x06\0\0\0\0\0\x01\
        NG?\xf8\0\0\0\0\0\0K\x01K\x02K\x03\x87\x94\x8f\x94(K\x04\x90es.";
    let pickle = parse(bytes).unwrap();
    let list = pickle.sequence(pickle.entry(pickle.root(), "a").unwrap()).unwrap();
    let values: Vec<Value<'_>> = list.iter().map(|&value| pickle.value(value)).collect();
    assert_eq!(values[..5], [Value::Int(1), Value::Int(-2), Value::Int(1 << 40), Value::Inert, Value::Inert]);
    let numbers = |value| pickle.sequence(value).unwrap().iter().map(|&one| pickle.number(one)).collect::<Vec<_>>();
    assert_eq!(numbers(list[5]), [Some(1), Some(2), Some(3)]);
    assert_eq!(numbers(list[6]), [Some(4)]);
    assert_eq!(pickle.number(list[1]), None, "not negative");
}

#[test]
fn what_would_be_called_is_only_named() {
    let pickle = parse(b"\x80\x02cos\nsystem\nX\x06\0\0\0rm -rf\x85R}X\x01\0\0\0kK\x07sb(K\x01K\x02u.").unwrap();
    let Value::Object(object) = pickle.value(pickle.root()) else { panic!("no object") };
    assert_eq!(pickle.value(object.class), Value::Global { module: "os", name: "system" });
    assert_eq!(pickle.text(pickle.sequence(object.args).unwrap()[0]), Some("rm -rf"));
    assert_eq!(pickle.entry(object.state, "k").and_then(|seven| pickle.number(seven)), Some(7));
    let Value::Dict(items) = pickle.value(object.items) else { panic!("no members") };
    assert_eq!(items.len(), 2);
}

#[test]
fn what_is_alike_and_never_changes_is_kept_once() {
    let size = b"h\0K\x08M\0\x10\x86\x85R";
    let class = b"\x80\x02ctorch\nSize\nq\x000";
    let many = [&class[..], b"(", &size.repeat(1000), b"l."].concat();
    let pickle = parse(&many).unwrap();
    let sizes = pickle.sequence(pickle.root()).unwrap();
    assert_eq!(sizes.len(), 1000);
    for &size in sizes {
        let Value::Object(object) = pickle.value(size) else { panic!("no object") };
        let dims = pickle.sequence(pickle.sequence(object.args).unwrap()[0]).unwrap();
        assert_eq!((pickle.number(dims[0]), pickle.number(dims[1])), (Some(8), Some(4096)));
    }
    assert_eq!((pickle.objects.len(), pickle.items.len()), (1, 1003), "two tuples and the list");
    // A value that holds a mutable one is its own; a shared value takes no state and no members.
    let own = parse(b"\x80\x02(]K\x01a\x85]K\x02a\x85l.").unwrap();
    let lists: Vec<_> = own.sequence(own.root()).unwrap().iter().map(|&one| own.sequence(one).unwrap()[0]).collect();
    assert_ne!(own.sequence(lists[0]), own.sequence(lists[1]));
    assert_eq!(refusal(&[&class[..], size, b"}b."].concat()), "state is given to what was not made");
    assert_eq!(refusal(&[&class[..], size, b"K\x01a."].concat()), "members are given to what holds none");
}

#[test]
fn containers_grow_in_any_order() {
    // Two lists filled by turns: neither may lose what it has.
    let mut bytes = b"\x80\x02]q\0]q\x01".to_vec();
    for n in 0..200_u8 {
        bytes.extend([b'h', n % 2, b'K', n, b'a', b'0']);
    }
    bytes.extend(b"\x86.");
    let pickle = parse(&bytes).unwrap();
    for (nth, &list) in pickle.sequence(pickle.root()).unwrap().iter().enumerate() {
        let found: Vec<_> = pickle.sequence(list).unwrap().iter().map(|&n| pickle.number(n).unwrap()).collect();
        assert_eq!(found, (nth as u64..200).step_by(2).collect::<Vec<_>>());
    }
    assert!(pickle.items.len() < 1000, "{}", pickle.items.len());
}

#[test]
fn lies_about_lengths_are_refused() {
    assert_eq!(refusal(b""), "pickle ends too early");
    assert_eq!(refusal(b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\xffN."), "frame reaches beyond the pickle");
    for lie in [
        &b"\x8b\xff\xff\xff\x7f"[..],
        b"X\xff\xff\xff\xff",
        b"B\xff\xff\xff\xffx",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        assert_eq!(refusal(&[b"\x80\x04", lie, b"."].concat()), "pickle ends too early", "{lie:?}");
    }
}

#[test]
fn opcodes_that_do_not_fit_are_refused() {
    let stack = "stack is empty";
    let cases: [(&[u8], &str); 17] = [
        (b"\x80\x01N.", "protocol is none of 2 to 5"),
        (b"(lp0\n.", "pickle does not begin with its protocol"),
        (b"\x80\x02I1\n.", "opcode is none that is read"),
        (b"\x80\x02.", stack),
        (b"\x80\x02N(.", stack),
        (b"\x80\x02NN.", "pickle ends with values left over"),
        (b"\x80\x02N.N", "bytes follow the pickle"),
        (b"\x80\x02t.", "no mark"),
        (b"\x80\x02N(\x85.", stack),
        (b"\x80\x02NNa.", "members are given to what holds none"),
        (b"\x80\x02]NNs.", "members are given to what holds none"),
        (b"\x80\x02}(Nu.", "key without a value"),
        (b"\x80\x02]Nb.", "state is given to what was not made"),
        (b"\x80\x02h\0.", "memo holds no such value"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "memo is not filled in order"),
        (b"\x80\x02a.", stack),
        (b"\x80\x02cos\nsystem.", "pickle ends too early"),
    ];
    for (bytes, what) in cases {
        assert_eq!(refusal(bytes), what, "{bytes:?}");
    }
}

#[test]
fn bombs_cost_no_more_than_their_bytes() {
    // A tuple of the tuple before, twice, a thousand times: 2^1000 members if it were written out.
    let mut doubling = b"\x80\x04)".to_vec();
    (0..1000).for_each(|_| doubling.extend(b"2\x86"));
    doubling.push(b'.');
    assert_eq!(parse(&doubling).unwrap().nodes(), 1000);
    // As deep as it is long.
    let mut deep = b"\x80\x04)".to_vec();
    deep.extend([0x85].repeat(1 << 20));
    deep.push(b'.');
    assert_eq!(parse(&deep).unwrap().nodes(), 1 << 20);
    let marks = [&b"\x80\x02"[..], &b"(".repeat(STACK_MAX + 1)].concat();
    assert_eq!(refusal(&marks), "too many marks");
    let stack = [&b"\x80\x02N"[..], &b"2".repeat(STACK_MAX)].concat();
    assert_eq!(refusal(&stack), "too many values wait on the stack");
    let nodes = [&b"\x80\x02("[..], &b"]0".repeat(NODES_MAX + 1)].concat();
    assert_eq!(refusal(&nodes), "too many values");
}

#[test]
fn values_are_reserved_as_they_are_made() {
    // Two bytes for a value of 16.
    let values = [&b"\x80\x02(N"[..], &b"2Q".repeat(200_000), b"l."].concat();
    let mut left = 1_i64 << 20;
    let mut reserve = |bytes: u64| {
        left -= i64::try_from(bytes).unwrap();
        left >= 0
    };
    let refused = Pickle::parse(&values, &mut reserve).expect_err("refused").what;
    assert_eq!(refused, "its values take too much memory (--memory)");
    // A list that doubles is reserved once it has.
    assert!(left > -(2 << 20), "{left}");
}
