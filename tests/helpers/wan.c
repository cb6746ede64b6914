/* A wide-area network between hosts: one TUN device for each, and this relay between them, which delays, paces and drops packets.
 *
 *     wan PREFIX HOSTS DELAY_MS JITTER_MS RATE_MBIT LOSS_PERCENT
 *
 * creates PREFIX1 to PREFIXn, prints "ready", and relays until its standard input is closed. A line there, "DELAY_MS JITTER_MS
 * RATE_MBIT LOSS_PERCENT", changes the network while it carries packets; the relay answers with "changed". A packet goes to the
 * device whose number is the last byte of its IPv4 destination. Each host has an uplink of that rate with 256 KiB of buffer before it,
 * as a router has; the delay is one way, behind the uplink, and packets of a pair of hosts keep their order. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 65, SLOTS = 1 << 15, BUFFER_BYTES = 256 << 10, SMALLEST_HEADER = 20, DESTINATION = 19 };
typedef struct { double due; int to, length; unsigned char *bytes; } Packet;
static Packet heap[SLOTS];  /* the earliest first */
static int size, hosts, devices[HOSTS];
static double last_due[HOSTS][HOSTS], free_at[HOSTS];
static double delay_seconds, jitter_seconds, bytes_per_second, loss;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static void set_network(double delay_ms, double jitter_ms, double rate_mbit, double loss_percent) {
  delay_seconds = delay_ms * 1e-3;
  jitter_seconds = jitter_ms * 1e-3;
  bytes_per_second = rate_mbit * 125e3;
  loss = loss_percent * 1e-2;
}

static void push(Packet packet) {
  int place = size++;
  for (; place && heap[(place - 1) / 2].due > packet.due; place = (place - 1) / 2) heap[place] = heap[(place - 1) / 2];
  heap[place] = packet;
}

static Packet pop(void) {
  Packet earliest = heap[0], packet = heap[--size];
  int place = 0;
  for (int child; (child = 2 * place + 1) < size; place = child) {
    if (child + 1 < size && heap[child + 1].due < heap[child].due) child++;
    if (heap[child].due >= packet.due) break;
    heap[place] = heap[child];
  }
  heap[place] = packet;
  return earliest;
}

/* Takes what a host has sent. */
static void take(int from) {
  unsigned char buffer[65536];
  for (ssize_t length; (length = read(devices[from], buffer, sizeof buffer)) >= SMALLEST_HEADER;) {
    int to = buffer[DESTINATION], is_ipv4 = buffer[0] >> 4 == 4;
    if (!is_ipv4 || to < 1 || to > hosts || to == from || size == SLOTS) continue;
    double present = now(), start = free_at[from] > present ? free_at[from] : present;
    if ((start - present) * bytes_per_second > BUFFER_BYTES) continue;
    free_at[from] = start + length / bytes_per_second;
    if (drand48() < loss) continue;
    double due = free_at[from] + delay_seconds + jitter_seconds * drand48();
    if (due < last_due[from][to]) due = last_due[from][to];
    last_due[from][to] = due;
    Packet packet = {due, to, (int)length, malloc(length)};
    memcpy(packet.bytes, buffer, length);
    push(packet);
  }
}

static void deliver(void) {
  while (size && heap[0].due <= now()) {
    Packet packet = pop();
    if (write(devices[packet.to], packet.bytes, packet.length) < 0) {}  /* a host that is cut off, or not yet there, gets nothing */
    free(packet.bytes);
  }
}

static int open_device(const char *prefix, int host) {
  struct ifreq request = {0};
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  snprintf(request.ifr_name, IFNAMSIZ, "%s%d", prefix, host);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) {
    perror("/dev/net/tun");
    exit(1);
  }
  return device;
}

int main(int count, char **arguments) {
  if (count != 7 || (hosts = atoi(arguments[2])) < 1 || hosts >= HOSTS) return 2;
  set_network(atof(arguments[3]), atof(arguments[4]), atof(arguments[5]), atof(arguments[6]));
  struct pollfd polls[HOSTS] = {{STDIN_FILENO, POLLIN, 0}};
  for (int host = 1; host <= hosts; host++) {
    devices[host] = open_device(arguments[1], host);
    polls[host] = (struct pollfd){devices[host], POLLIN, 0};
  }
  puts("ready");
  fflush(stdout);
  for (;;) {
    double seconds = size ? heap[0].due - now() : 3600;
    if (seconds < 0) seconds = 0;
    struct timespec wait = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    ppoll(polls, hosts + 1, &wait, NULL);
    if (polls[0].revents) {
      char line[256];
      double delay_ms, jitter_ms, rate_mbit, loss_percent;
      if (!fgets(line, sizeof line, stdin)) return 0;
      if (sscanf(line, "%lf %lf %lf %lf", &delay_ms, &jitter_ms, &rate_mbit, &loss_percent) != 4) return 2;
      set_network(delay_ms, jitter_ms, rate_mbit, loss_percent);
      puts("changed");
      fflush(stdout);
    }
    for (int host = 1; host <= hosts; host++)
      if (polls[host].revents & POLLIN) take(host);
    deliver();
  }
}
