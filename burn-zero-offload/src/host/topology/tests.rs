use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A directory with the files of a machine.
struct Root(PathBuf);

impl Root {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(env::temp_dir().join(format!("offload-topology-{}-{next}", process::id())))
    }

    fn file(self, path: &str, text: &str) -> Self {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn siblings(self, cpu: usize, list: &str) -> Self {
        let cpu = format!("sys/devices/system/cpu/cpu{cpu}");
        self.file(&format!("{cpu}/topology/thread_siblings_list"), list)
    }

    /// Four cores of two threads each, the way Linux numbers them on x86.
    fn smt() -> Self {
        let list = |cpu| format!("{},{}\n", cpu % 4, cpu % 4 + 4);
        (0..8).fold(Self::new(), |root, cpu| root.siblings(cpu, &list(cpu)))
    }

    fn node(self, node: usize, list: &str) -> Self {
        let node = format!("sys/devices/system/node/node{node}");
        self.file(&format!("{node}/cpulist"), list)
    }

    /// The same on two nodes.
    fn numa() -> Self {
        Self::smt().node(0, "0-1,4-5\n").node(1, "2-3,6-7\n")
    }

    fn gpu(self, address: &str, node: &str) -> Self {
        let device = format!("sys/bus/pci/devices/{}", address.to_lowercase());
        let driver = format!("proc/driver/nvidia/gpus/{address}");
        self.file(&format!("{device}/numa_node"), node)
            .file(&format!("{driver}/information"), "Model:\n")
    }

    fn read(&self, allowed: impl IntoIterator<Item = usize>) -> Machine {
        Machine::read(&self.0, allowed.into_iter().collect(), None)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

type Ranks = Option<(usize, usize)>;

/// Threads asked for, ranks; threads, CPUs and node that are right.
type Case<'a> = (Option<usize>, Ranks, usize, &'a [usize], Option<usize>);

#[track_caller]
fn check(machine: &Machine, cases: &[Case]) {
    for &(asked, ranks, threads, cpus, node) in cases {
        let cpus = cpus.to_vec();
        let right = Placement {
            threads,
            cpus,
            node,
        };
        let context = format!("asked {asked:?}, ranks {ranks:?}, {machine:?}");
        assert_eq!(decide(asked, machine, ranks), right, "{context}");
    }
}

#[test]
fn siblings_count_as_one_core() {
    let machine = Root::smt().read(0..8);
    assert_eq!(machine.cores, [[0, 4], [1, 5], [2, 6], [3, 7]]);
    check(&machine, &[(None, None, 4, &[0, 1, 2, 3], None)]);
}

#[test]
fn only_allowed_cpus_are_chosen() {
    let machine = Root::smt().read([1, 2, 5, 7]);
    check(&machine, &[(None, None, 3, &[1, 2, 7], None)]);
    // One CPU of each core: nothing is left to restrict.
    check(&Root::smt().read([2, 4, 7]), &[(None, None, 3, &[], None)]);
}

#[test]
fn a_quota_limits_the_threads_and_not_the_cpus() {
    let mut machine = Root::new().read(0..16);
    machine.quota = Some(6);
    check(
        &machine,
        &[
            (None, None, 6, &[], None),
            (None, Some((2, 3)), 2, &[10, 11, 12, 13, 14], None),
            (None, Some((2, 4)), 1, &[8, 9, 10, 11], None),
            (None, Some((7, 8)), 1, &[14, 15], None),
            (Some(16), None, 16, &[], None),
        ],
    );
}

#[test]
fn threads_stay_on_the_node_of_the_device() {
    let root = Root::numa()
        .gpu("0000:0A:00.0", "1\n")
        .gpu("0000:1b:00.0", "1\n");
    let machine = root.read(0..8);
    assert_eq!(machine.nodes, [[0, 1, 4, 5], [2, 3, 6, 7]]);
    check(
        &machine,
        &[
            (None, None, 2, &[2, 3], Some(1)),
            (None, Some((1, 2)), 1, &[3], Some(1)),
        ],
    );
    // Nothing is allowed there, or nothing else.
    check(&root.read([0, 1]), &[(None, None, 2, &[], None)]);
    check(&root.read([2, 3]), &[(None, None, 2, &[], Some(1))]);
}

#[test]
fn devices_on_several_nodes_are_near_none() {
    for other in ["0", "-1", "", "one", "99999999999999999999"] {
        let root = Root::numa().gpu("0000:0a:00.0", "1");
        assert_eq!(root.read(0..8).device_node, Some(1));
        let machine = root.gpu("0000:8a:00.0", other).read(0..8);
        assert_eq!(machine.device_node, None, "{other:?}");
        check(&machine, &[(None, None, 4, &[0, 1, 2, 3], None)]);
    }
    let unknown = Root::numa().gpu("0000:0a:00.0", "-1");
    assert_eq!(unknown.read(0..8).device_node, None);
}

/// acceptance.md, CPU step 81: ranks share a machine.
#[test]
fn ranks_share_the_allowed_cores() {
    check(
        &Root::new().read(8..24),
        &[
            (None, Some((0, 1)), 16, &[], None),
            (None, Some((0, 4)), 4, &[8, 9, 10, 11], None),
            (None, Some((1, 4)), 4, &[12, 13, 14, 15], None),
            (None, Some((2, 4)), 4, &[16, 17, 18, 19], None),
            (None, Some((3, 4)), 4, &[20, 21, 22, 23], None),
            (None, Some((2, 3)), 5, &[18, 19, 20, 21, 22], None),
        ],
    );
    // CPUs are numbered across the nodes, but shares follow the nodes.
    check(
        &Root::new().node(0, "0,2,4,6").node(1, "1,3,5,7").read(0..8),
        &[
            (None, Some((0, 2)), 4, &[0, 2, 4, 6], None),
            (None, Some((1, 2)), 4, &[1, 3, 5, 7], None),
        ],
    );
}

#[test]
fn more_ranks_than_cores_go_round() {
    check(
        &Root::new().read([3, 5]),
        &[
            (None, Some((0, 4)), 1, &[3], None),
            (None, Some((1, 4)), 1, &[5], None),
            (None, Some((2, 4)), 1, &[3], None),
            (None, Some((3, 4)), 1, &[5], None),
        ],
    );
}

#[test]
fn asked_threads_stay_on_the_chosen_cores_while_they_fit() {
    check(
        &Root::numa().gpu("0000:0a:00.0", "1").read(0..8),
        &[
            (Some(0), None, 2, &[2, 3], Some(1)),
            (Some(1), None, 1, &[2, 3], Some(1)),
            (Some(2), None, 2, &[2, 3], Some(1)),
            (Some(3), None, 3, &[], None),
            (Some(2), Some((0, 2)), 2, &[], None),
        ],
    );
}

#[test]
fn cpu_lists_are_read_as_the_kernel_writes_them() {
    let list = Some(vec![0, 1, 2, 3, 8, 10, 11]);
    assert_eq!(cpu_list("0-3,8,10-11\n"), list);
    assert_eq!(cpu_list("10-11,8,0-3,2"), list);
    assert_eq!(cpu_list("7"), Some(vec![7]));
    assert_eq!(cpu_list("0-65535").map(|cpus| cpus.len()), Some(65_536));
    let garbage = [
        "", "\n", ",", "1,", "a", "1-", "-1", "3-1", "1-2-3", "0x3", "0-31:2/4",
    ];
    let endless = ["0-65536", "0-18446744073709551615", "99999999999999999999"];
    for text in garbage.into_iter().chain(endless) {
        assert_eq!(cpu_list(text), None, "{text:?}");
    }
}

#[test]
fn what_is_missing_or_odd_is_unknown() {
    check(&Root::new().read(0..3), &[(None, None, 3, &[], None)]);
    check(&Root::new().read([]), &[(None, Some((1, 2)), 1, &[], None)]);

    // CPU 3 tells nothing and CPU 2 nonsense: cores of their own.
    let root = Root::new()
        .siblings(0, "0-1")
        .siblings(1, "0-1")
        .siblings(2, "2-");
    let root = root
        .node(1, "none")
        .node(70_000, "0-3")
        .gpu("0000:0a:00.0", "1");
    let machine = root
        .file("sys/devices/system/node/online", "0-1")
        .read(0..4);
    assert_eq!(machine.nodes, vec![Vec::<usize>::new(); 2]);
    check(&machine, &[(None, None, 3, &[0, 2, 3], None)]);
}

#[test]
fn the_first_launcher_that_tells_both_numbers_counts() {
    let rank = |values: [&str; 8]| {
        let names = LAUNCHERS.iter().flat_map(|&(rank, size)| [rank, size]);
        let set: Vec<_> = names
            .zip(values)
            .filter(|(_, value)| *value != "unset")
            .collect();
        local_rank(|name| {
            let found = set.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| value.to_string())
        })
    };
    let no = "unset";
    assert_eq!(rank([no; 8]), None);
    assert_eq!(rank(["0", "1", "1", "4", no, no, no, no]), Some((0, 1)));
    assert_eq!(rank([no, no, "2", "3", "1", "4", no, no]), Some((2, 3)));
    assert_eq!(rank(["0", no, no, "3", "5", "6", "1", "4"]), Some((5, 6)));
    assert_eq!(rank([no, no, no, no, no, no, "1", "4"]), Some((1, 4)));
    for (odd, size) in [("2", "2"), ("0", "0"), ("-1", "2"), ("x", "2"), ("0", "")] {
        assert_eq!(rank([odd, size, no, no, no, no, "1", "4"]), Some((1, 4)));
    }
}

#[test]
fn this_machine_has_a_placement() {
    let allowed = affinity().unwrap();
    let automatic = Placement::choose(None, true);
    assert!((1..=allowed.len()).contains(&automatic.threads));
    assert!(automatic.cpus.iter().all(|cpu| allowed.contains(cpu)));
    let asked = Placement::choose(Some(5000), true);
    assert_eq!((asked.threads, asked.cpus), (5000, vec![]));
}
