//! How many threads the optimizer step gets, and on which CPUs they may run.
//!
//! The step streams master weights and optimizer state: memory bandwidth sets its speed, and a
//! second thread on a core (SMT) adds little. So there is one thread per physical core, on the NUMA
//! node of the device where that is known, and training processes on one machine share its cores.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::Path;
use std::{env, fmt, fs, thread};

use super::threads::affinity;

/// No CPU, node or rank has a number this high. Keeps an odd file from asking for endless memory.
const NUMBER_LIMIT: usize = 65_536;

/// Variables with the local rank and the number of local ranks: torchrun, Open MPI, MPICH and Intel
/// MPI, Slurm.
const LAUNCHERS: [(&str, &str); 4] = [
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
];

/// Which CPUs the threads of the step use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// Threads of the step, at least one.
    pub(crate) threads: usize,
    /// CPUs to restrict the threads to. Empty: those the process has.
    pub(crate) cpus: Vec<usize>,
    /// NUMA node of the device, where it is known and the threads stay on it.
    pub(crate) node: Option<usize>,
}

impl Placement {
    /// The placement on this machine, with `asked` threads if that is given and not zero, `near` the
    /// devices if weights are on one of them.
    ///
    /// CPUs are chosen among those the calling thread may run on.
    pub(crate) fn choose(asked: Option<usize>, near: bool) -> Self {
        let parallelism = thread::available_parallelism().ok().map(NonZero::get);
        let affinity = affinity();
        let known = affinity.is_some();
        let allowed = affinity.unwrap_or_else(|| (0..parallelism.unwrap_or(1)).collect());
        // The standard library has looked at the quotas of the cgroups already.
        let quota = parallelism.filter(|&parallelism| parallelism < allowed.len());
        let mut machine = Machine::read(Path::new("/"), allowed, quota);
        machine.device_node = machine.device_node.filter(|_| near);
        let placement = decide(asked, &machine, local_rank(|name| env::var(name).ok()));
        if known {
            return placement;
        }
        // A guess is good enough for a number of threads, but could move them to forbidden CPUs.
        Self {
            cpus: Vec::new(),
            node: None,
            ..placement
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} threads", self.threads)?;
        if !self.cpus.is_empty() {
            let cpus: Vec<String> = self.cpus.iter().map(usize::to_string).collect();
            write!(f, " on CPUs {}", cpus.join(","))?;
        }
        self.node
            .map_or(Ok(()), |node| write!(f, " of NUMA node {node}"))
    }
}

/// What decides the placement. Anything the system does not tell is left empty.
#[derive(Debug, Default)]
struct Machine {
    /// CPUs this process may use, in order.
    allowed: Vec<usize>,
    /// CPUs whose time this process may use up, if those are fewer.
    quota: Option<usize>,
    /// CPUs of each physical core: SMT siblings.
    cores: Vec<Vec<usize>>,
    /// CPUs of each NUMA node.
    nodes: Vec<Vec<usize>>,
    /// The node all devices are attached to.
    device_node: Option<usize>,
}

impl Machine {
    /// Reads the topology from the `sys` and `proc` trees in `root`.
    fn read(root: &Path, allowed: Vec<usize>, quota: Option<usize>) -> Self {
        let system = root.join("sys/devices/system");
        let siblings = |cpu: &usize| {
            let file = format!("cpu/cpu{cpu}/topology/thread_siblings_list");
            cpu_list(&fs::read_to_string(system.join(file)).ok()?)
        };
        // Each sibling lists the whole core.
        let cores: BTreeSet<_> = allowed.iter().filter_map(siblings).collect();

        let mut nodes = Vec::new();
        for name in names(&system.join("node")) {
            let Some(node) = name.strip_prefix("node").and_then(number) else {
                continue;
            };
            if nodes.len() <= node {
                nodes.resize(node + 1, Vec::new());
            }
            let text = fs::read_to_string(system.join("node").join(&name).join("cpulist"));
            nodes[node] = text.ok().as_deref().and_then(cpu_list).unwrap_or_default();
        }

        Self {
            allowed,
            quota,
            cores: cores.into_iter().collect(),
            nodes,
            device_node: device_node(root),
        }
    }

    /// The first allowed CPU of each physical core. Cores of one node follow one another, however
    /// the machine numbers them, so that a rank's share lies on as few nodes as possible.
    fn physical_cores(&self) -> Vec<usize> {
        let mut covered = BTreeSet::new();
        let mut cpus = Vec::new();
        for &cpu in &self.allowed {
            if covered.insert(cpu) {
                cpus.push(cpu);
                let core = self.cores.iter().find(|core| core.contains(&cpu));
                covered.extend(core.into_iter().flatten());
            }
        }
        let node = |cpu| self.nodes.iter().position(|node| node.contains(&cpu));
        cpus.sort_by_cached_key(|&cpu| (node(cpu), cpu));
        cpus
    }

    /// The device's node and those of `cores` that are on it, if there are any.
    fn near_device(&self, cores: &[usize]) -> Option<(usize, Vec<usize>)> {
        let node = self.device_node?;
        let cpus = self.nodes.get(node)?;
        let near: Vec<_> = cores
            .iter()
            .copied()
            .filter(|cpu| cpus.contains(cpu))
            .collect();
        (!near.is_empty()).then_some((node, near))
    }
}

/// The placement on `machine` for a process that is `(rank, size)` among those on it.
fn decide(asked: Option<usize>, machine: &Machine, ranks: Option<(usize, usize)>) -> Placement {
    let all = machine.physical_cores();
    let (mut node, cores) = match machine.near_device(&all) {
        Some((node, near)) => (Some(node), near),
        None => (None, all),
    };

    let (rank, size) = ranks.unwrap_or((0, 1));
    let share = (cores.len() / size.max(1)).max(1);
    // Goes round only where there are more ranks than cores.
    let mut cpus = cores
        .chunks_exact(share)
        .cycle()
        .nth(rank)
        .unwrap_or_default()
        .to_vec();

    let quota = machine
        .quota
        .map_or(usize::MAX, |quota| quota / size.max(1));
    let automatic = cpus.len().min(quota).max(1);
    let threads = asked.filter(|&asked| asked > 0).unwrap_or(automatic);

    if threads > cpus.len() {
        // These cores cannot hold the threads asked for: the system may use all it has.
        cpus.clear();
        node = None;
    } else if cpus.len() == machine.allowed.len() {
        cpus.clear();
    }
    Placement {
        threads,
        cpus,
        node,
    }
}

/// Rank of this process on this machine and number of ranks there, from the first launcher that
/// tells both.
///
/// Each rank takes a share of the CPUs it may use. Where the launcher has bound every rank to CPUs
/// of its own, that is a share of a share: the number of threads is then to be set by hand.
fn local_rank(variable: impl Fn(&str) -> Option<String>) -> Option<(usize, usize)> {
    LAUNCHERS.iter().find_map(|&(rank, size)| {
        let [rank, size] = [rank, size].map(|name| variable(name).as_deref().and_then(number));
        rank.zip(size).filter(|(rank, size)| rank < size)
    })
}

/// The node of the NVIDIA GPUs, if they are all on the same one.
fn device_node(root: &Path) -> Option<usize> {
    let node = |address: String| {
        let devices = root.join("sys/bus/pci/devices");
        let file = devices.join(address.to_lowercase()).join("numa_node");
        // -1 where the system does not know, which is no number here.
        number(&fs::read_to_string(file).ok()?)
    };
    let gpus = names(&root.join("proc/driver/nvidia/gpus"));
    let nodes: BTreeSet<_> = gpus.into_iter().map(node).collect();
    nodes
        .first()
        .copied()
        .flatten()
        .filter(|_| nodes.len() == 1)
}

/// The names in a directory; none if it cannot be read.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// The number that `text` is, unless it is too high to be one of a CPU, node or rank.
fn number(text: &str) -> Option<usize> {
    text.trim()
        .parse()
        .ok()
        .filter(|&number| number < NUMBER_LIMIT)
}

/// CPUs in the kernel's list format, `0-3,8,10-11`, in order. `None` if `text` is something else.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = BTreeSet::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus.into_iter().collect())
}

// The fixtures have names that only Linux has, and some that other systems do not allow.
#[cfg(all(test, target_os = "linux"))]
mod tests;
